"""The key of a private swarm, without a network: what opens where, once, and what a file may hold."""

import logging
import re
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner

from sapo_node import config_load
from sapo_node.cli import cli
from sapo_node.errors import SapoError
from sapo_node.swarm import secret as secret_module
from sapo_node.swarm.secret import (
    FRESH_SECONDS,
    OVERHEAD,
    REQUEST_OVERHEAD,
    Conversation,
    Secret,
    SecretError,
    Unproven,
    make,
    parse,
)

OLD, NEW, OTHER = (bytes([n]) * 32 for n in (1, 2, 3))
NAME = "/sapo/1/fetch"


class Clock:
    def __init__(self, now: float = 1_770_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def member(*keys: bytes, swarm: str = "test", clock: Clock | None = None) -> Secret:
    return Secret(keys or (OLD,), swarm, clock or Clock())


def asked(secret: Secret, data: bytes = b"what?") -> tuple[bytes, Conversation]:
    return secret.ask(NAME, "asker", "asked", data)


# Requests and answers


def test_a_request_and_its_answers_open_at_the_other_end() -> None:
    sealed, here = asked(member())
    data, there = member().heed(NAME, "asker", "asked", sealed)
    assert data == b"what?"
    assert [here.read(there.answer(part)) for part in (b"this", b"", b"that")] == [b"this", b"", b"that"]
    assert len(sealed) == len(data) + REQUEST_OVERHEAD
    assert len(there.answer(b"this")) == 4 + OVERHEAD


@pytest.mark.parametrize(
    "place",
    [("/sapo/hello", "asker", "asked"), (NAME, "thief", "asked"), (NAME, "asker", "third"), (NAME, "asked", "asker")],
    ids=["another protocol", "another asker", "another peer asked", "sent back"],
)
def test_a_captured_request_opens_nowhere_else(place: tuple[str, str, str]) -> None:
    sealed, _ = asked(member())
    with pytest.raises(Unproven, match="not sealed"):
        member().heed(*place, sealed)


@pytest.mark.parametrize("other", [member(OTHER), member(OLD, swarm="Test")], ids=["another key", "another name"])
def test_another_swarms_requests_do_not_open(other: Secret) -> None:
    sealed, _ = asked(other)
    with pytest.raises(Unproven, match="not sealed"):
        member().heed(NAME, "asker", "asked", sealed)


def test_a_request_opens_once_even_for_who_stole_the_askers_identity() -> None:
    secret, (sealed, _) = member(), asked(member())
    secret.heed(NAME, "asker", "asked", sealed)
    with pytest.raises(Unproven, match="came before"):
        secret.heed(NAME, "asker", "asked", sealed)


@pytest.mark.parametrize(("seconds", "opens"), [(55.0, True), (-55.0, True), (65.0, False), (-65.0, False)])
def test_a_request_is_good_for_a_minute(seconds: float, opens: bool) -> None:
    clock = Clock()
    sealed, _ = asked(member(clock=clock))
    receiver = member(clock=Clock(clock.now + seconds))
    if opens:
        assert receiver.heed(NAME, "asker", "asked", sealed)[0] == b"what?"
    else:
        with pytest.raises(Unproven, match="not fresh"):
            receiver.heed(NAME, "asker", "asked", sealed)


def test_a_member_whose_clock_differs_is_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    receiver = member(clock=clock)
    with caplog.at_level(logging.WARNING):
        for ahead in (300.0, 200.0):
            sealed, _ = asked(member(clock=Clock(clock.now + ahead)))
            with pytest.raises(Unproven):
                receiver.heed(NAME, "asker", "asked", sealed)
    (record,) = caplog.records
    assert "asker has this swarm's key, but its clock is 300 s ahead of this node's" in record.message


def test_an_answer_belongs_to_its_request_and_place() -> None:
    sealed, here = asked(member())
    again, other = asked(member())
    receiver = member()
    _, there = receiver.heed(NAME, "asker", "asked", sealed)
    _, elsewhere = receiver.heed(NAME, "asker", "asked", again)
    first, second = there.answer(b"1"), there.answer(b"2")
    for conversation, answer in [(here, second), (other, first), (elsewhere, sealed)]:
        with pytest.raises(Unproven):
            conversation.read(answer)


@pytest.mark.parametrize("at", [0, 12, 20, -1])
def test_a_changed_bit_shows(at: int) -> None:
    sealed, _ = asked(member())
    changed = bytearray(sealed)
    changed[at] ^= 1
    with pytest.raises(Unproven):
        member().heed(NAME, "asker", "asked", bytes(changed))


@pytest.mark.parametrize("data", [b"", b"x", bytes(OVERHEAD), bytes(1000), b"SAPO" * 20])
def test_anything_else_proves_nothing(data: bytes) -> None:
    with pytest.raises(Unproven):
        member().heed(NAME, "asker", "asked", data)
    with pytest.raises(Unproven):
        member().open_hint("topic", "sender", data)


def test_what_is_remembered_is_bounded_by_number_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secret_module, "MAX_SEEN", 3)
    clock = Clock()
    receiver, sender = member(clock=clock), member(clock=clock)
    for _ in range(5):
        receiver.heed(NAME, "asker", "asked", asked(sender)[0])
    assert len(receiver._seen) == 3
    clock.now += 2 * FRESH_SECONDS + 1
    receiver.heed(NAME, "asker", "asked", asked(sender)[0])
    assert len(receiver._seen) == 1


def test_a_hint_belongs_to_its_topic_and_sender() -> None:
    sealed = member().seal_hint("topic", "sender", b"news")
    assert member().open_hint("topic", "sender", sealed) == b"news"
    for place in [("other", "sender"), ("topic", "thief")]:
        with pytest.raises(Unproven):
            member().open_hint(*place, sealed)


# What an outsider sees


def test_no_two_sealed_messages_are_alike() -> None:
    assert len({asked(member())[0] for _ in range(50)}) == 50


def test_names_show_nothing_and_follow_from_key_and_swarm() -> None:
    names = [member(OLD).names(NAME), member(NEW).names(NAME), member(OLD, swarm="b").names(NAME), member().names("x")]
    assert all(re.fullmatch("/[0-9a-f]{32}", name) for (name,) in names)
    assert len({name for (name,) in names}) == 4
    assert member(OLD).names(NAME) == names[0]


# Changing the key


def test_every_key_opens_and_an_answer_has_the_key_of_its_request() -> None:
    sealed, here = asked(member(OLD))
    data, there = member(NEW, OLD).heed(NAME, "asker", "asked", sealed)
    assert (data, here.read(there.answer(b"yes"))) == (b"what?", b"yes")
    assert member(OLD, NEW).open_hint("t", "s", member(NEW, OLD).seal_hint("t", "s", b"news")) == b"news"


def test_the_first_key_seals_and_names() -> None:
    with pytest.raises(Unproven):
        member(OLD).heed(NAME, "asker", "asked", asked(member(NEW, OLD))[0])
    assert member(NEW, OLD).names(NAME) == [*member(NEW).names(NAME), *member(OLD).names(NAME)]


# The file


def test_a_made_key_is_private_new_and_readable_by_this_program(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert Secret.load(tmp_path / "a", "test").names("x") != Secret.load(tmp_path / "b", "test").names("x")
    with pytest.raises(SapoError, match="exists already"):
        make(tmp_path / "a")


def test_the_command_makes_a_key_and_keeps_an_old_one(tmp_path: Path) -> None:
    file = tmp_path / "swarm.key"
    done = CliRunner().invoke(cli, ["swarm-key", str(file)])
    assert (done.exit_code, str(file) in done.output) == (0, True)
    made = file.read_bytes()
    assert len(parse(made, file)) == 1
    assert made.decode().strip() not in done.output
    assert isinstance(CliRunner().invoke(cli, ["swarm-key", str(file)]).exception, SapoError)
    assert file.read_bytes() == made


def test_a_relative_path_starts_at_the_config_files_folder(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("swarm: {secret_file: keys/swarm.key}\n")
    loaded = config_load.load(tmp_path / "node.yaml", {}, ())
    assert loaded.config.swarm.secret_file == tmp_path / "keys/swarm.key"


def test_a_key_that_others_can_read_is_refused_with_the_cure(tmp_path: Path) -> None:
    make(tmp_path / "key")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(SapoError, match=r"mode 0640\); run: chmod 600"):
        Secret.load(tmp_path / "key", "test")


def test_a_missing_file_is_told_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(SapoError, match="there is no key file; `sapo-node swarm-key` makes one"):
        Secret.load(tmp_path / "key", "test")


def test_a_file_holds_keys_comments_and_blank_lines() -> None:
    text = f"# since May\n{NEW.hex()}\n\n  {OLD.hex().upper()} \r\n"
    assert parse(text.encode(), Path("key")) == [NEW, OLD]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "holds no key"),
        (b"# nothing\n", "holds no key"),
        (b"our common password\n", "line 1 is no key"),
        (OLD.hex().encode() + b"\n" + b"ab" * 31, "line 2 is no key"),
        (b"a b" * 32, "line 1 is no key"),
        ("ä".encode() * 64, "line 1 is no key"),
        (b"\n".join([OLD.hex().encode()] * 2), "one of them twice"),
        (b"\n".join((bytes([n]) * 32).hex().encode() for n in range(5)), "more than 4 keys"),
        (b"#" * 5000, "is larger than 4096 bytes"),
    ],
)
def test_a_file_that_is_wrong_is_told_without_its_content(content: bytes, reason: str) -> None:
    with pytest.raises(SecretError, match=reason) as told:
        parse(content, Path("key"))
    assert OLD.hex() not in str(told.value)
    assert "password" not in str(told.value)
