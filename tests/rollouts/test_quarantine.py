"""Who can switch a task off, and who cannot. Times are passed in; a book of two lines stands for the peer book."""

from collections.abc import Iterable

import pytest

from sapo_node.rollouts.quarantine import (
    FRESH_SECONDS,
    MAX_PEERS,
    MAX_TASKS,
    MAX_WORDS,
    QUARANTINE_SECONDS,
    VOICES,
    Quarantine,
)

NOW = 1_800_000_000.0


class Book:
    """Peers named `old...` have a day of accepted history; a peer's network is what stands before the slash."""

    def aged(self, peer_id: str, now: float) -> bool:
        return "old" in peer_id

    def __init__(self) -> None:
        self.moved: dict[str, str] = {}  # peers that are reached by another network

    def network(self, peer_id: str) -> str:
        return self.moved.get(peer_id) or peer_id.partition("/")[0]


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine(Book())


def known(quarantine: Quarantine, peers: Iterable[str], now: float = NOW) -> list[str]:
    """Peers that agreed with us on another task."""
    peers = list(peers)
    for peer in peers:
        quarantine.agreed("other", peer, now)
    return peers


def voices(count: int = VOICES) -> list[str]:
    return [f"net{n}/old" for n in range(count)]


def dispute(quarantine: Quarantine, peers: Iterable[str], now: float = NOW) -> bool:
    return sum(quarantine.disagreed("bf", peer, now) for peer in peers) > 0


def test_trusted_peers_on_distinct_shares_switch_a_task_off_for_a_time(quarantine: Quarantine) -> None:
    assert dispute(quarantine, known(quarantine, voices()))
    assert quarantine.tasks(NOW) == ["bf"]
    assert quarantine.bars("bf", "net9/new", NOW + QUARANTINE_SECONDS - 1)
    assert not quarantine.bars("other", "net9/new", NOW)
    assert not quarantine.bars("bf", "net9/new", NOW + QUARANTINE_SECONDS)
    assert quarantine.tasks(NOW + QUARANTINE_SECONDS) == []


def test_one_voice_less_is_not_enough(quarantine: Quarantine) -> None:
    peers = known(quarantine, voices(VOICES - 1))
    assert not dispute(quarantine, peers * 10)


@pytest.mark.parametrize("ids", [40, 4000])
def test_free_identities_cannot_switch_a_task_off(quarantine: Quarantine, ids: int) -> None:
    crowd = [f"net{n}/new" for n in range(ids)]
    assert not dispute(quarantine, known(quarantine, crowd))
    assert not quarantine._disputed
    assert not quarantine._agreed, "they take no memory either"


def test_aged_identities_of_one_network_have_one_voice(quarantine: Quarantine) -> None:
    assert not dispute(quarantine, known(quarantine, [f"net1/old{n}" for n in range(40)]))


def test_an_aged_key_reached_by_three_networks_in_turn_has_one_voice() -> None:
    """Hope: my word stays under the network that I came by, so one day of patience is enough for three voices."""
    book = Book()
    quarantine = Quarantine(book)
    known(quarantine, ["mover/old", "a/old", "b/old"])
    for n in range(10):
        book.moved["mover/old"] = f"net{n}"
        assert not dispute(quarantine, ["mover/old"], NOW + n)
    assert not dispute(quarantine, ["a/old"])
    assert dispute(quarantine, ["b/old"]), "its newest word counts"


def test_a_crowd_on_one_network_makes_nobody_elses_word_forgotten(quarantine: Quarantine) -> None:
    crowd = [f"crowd/old{n}" for n in range(2 * MAX_WORDS)]
    peers = known(quarantine, voices())
    assert not dispute(quarantine, [*peers[:-2], *known(quarantine, crowd)])
    assert dispute(quarantine, peers[-2:-1]), "the first, the crowd and this one"


def test_who_agreed_on_nothing_else_is_not_heard(quarantine: Quarantine) -> None:
    for peer in voices():
        quarantine.agreed("bf", peer, NOW - 2 * FRESH_SECONDS)
    assert not dispute(quarantine, voices())


def test_one_trusted_peer_that_agrees_outweighs_all_others(quarantine: Quarantine) -> None:
    peers = known(quarantine, voices(40))
    quarantine.agreed("bf", "home/old", NOW)
    assert not dispute(quarantine, peers)
    assert dispute(quarantine, peers, NOW + FRESH_SECONDS + 1), "but its word does not last for ever"


def test_a_trusted_peer_is_judged_all_the_same_and_ends_a_quarantine(quarantine: Quarantine) -> None:
    dispute(quarantine, known(quarantine, voices()))
    assert not quarantine.bars("bf", "home/old", NOW)
    quarantine.agreed("bf", "home/old", NOW + 60)
    assert quarantine.tasks(NOW + 60) == []


def test_an_agreeing_newcomer_ends_nothing(quarantine: Quarantine) -> None:
    dispute(quarantine, known(quarantine, voices()))
    quarantine.agreed("bf", "net9/new", NOW)
    assert quarantine.tasks(NOW) == ["bf"]


def test_words_that_are_far_apart_do_not_add_up(quarantine: Quarantine) -> None:
    peers = known(quarantine, voices())
    apart = FRESH_SECONDS / (VOICES - 1) + 1
    assert not any(quarantine.disagreed("bf", peer, NOW + n * apart) for n, peer in enumerate(peers))


def test_after_its_end_new_words_are_needed(quarantine: Quarantine) -> None:
    peers = known(quarantine, voices())
    dispute(quarantine, peers)
    later = NOW + QUARANTINE_SECONDS
    assert not dispute(quarantine, peers[:-1], later)
    assert dispute(quarantine, peers[-1:], later)


def test_a_clock_that_was_set_back_ends_a_quarantine(quarantine: Quarantine) -> None:
    dispute(quarantine, known(quarantine, voices()))
    assert quarantine.tasks(NOW - 10_000) == []


def test_every_table_has_an_end(quarantine: Quarantine) -> None:
    peers = known(quarantine, voices(MAX_PEERS + 10))
    assert len(quarantine._agreed) == MAX_PEERS
    quarantine.agreed("bf", peers[-1], NOW)  # so that no quarantine begins
    dispute(quarantine, peers)
    assert len(quarantine._disputed["bf"]) == MAX_WORDS
    for n in range(2 * MAX_TASKS):
        quarantine.agreed(f"task {n}", peers[-1], NOW + n)
        quarantine.disagreed(f"task {n}", peers[-2], NOW + n)
    assert len(quarantine._confirmed) <= MAX_TASKS
    assert len(quarantine._disputed) <= MAX_TASKS
    assert len(quarantine._agreed[peers[-1]]) == 2
