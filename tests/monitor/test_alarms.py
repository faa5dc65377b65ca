"""Each alarm fires on its attack's numbers, keeps quiet on honest ones, and ends."""

import random
from collections.abc import Iterator

import pytest

from sapo_node.monitor import alarms
from sapo_node.monitor.alarms import Alarm, Collapse, Drift, Earned, Fallen, Levels, RewardHack, Sender, Strayed, earned

TASK = "logic"


def group(question: int, truth: str, answers: dict[str, float]) -> Earned:
    """A group of a question, with what each answer earned."""
    sha256 = question.to_bytes(32, "big")
    found = earned(sha256, truth.encode(), [(text.encode(), text, reward) for text, reward in answers.items()])
    assert found is not None
    return found


def feed(hack: RewardHack, groups: Iterator[Earned], count: int, now: float = 0.0) -> list[Alarm]:
    return [alarm for _ in range(count) for alarm in hack.own(TASK, next(groups), now)]


def hacked(start: int = 0) -> Iterator[Earned]:
    """One answer earns on every question, whose truths are all different."""
    return (group(i, f"truth {i}", {"(P ∨ Q)": 4.0}) for i in range(start, 10_000))


def honest(start: int = 0) -> Iterator[Earned]:
    return (group(i, f"truth {i}", {f"truth {i}": 4.0}) for i in range(start, 10_000))


# ---- reward hack -----------------------------------------------------------------------------------------------------


def test_one_answer_that_earns_on_sixteen_questions_of_other_truths_is_a_hack() -> None:
    hack = RewardHack()
    groups = hacked()
    assert feed(hack, groups, alarms.HACK_QUESTIONS - 1) == []
    (alarm,) = feed(hack, groups, 1)
    assert (alarm.kind, alarm.subject, alarm.begins) == ("reward hack", TASK, True)
    assert '"(P ∨ Q)"' in alarm.text
    assert hack.lasts(TASK)
    assert not hack.lasts("another task")
    assert feed(hack, groups, 200) == []  # told once


def test_an_answer_that_earns_on_few_of_the_questions_it_is_given_to_is_no_hack() -> None:
    """A scorer that takes 1 for 0.9, and a policy that always says "1": its few rewards are all for that."""
    for every in (1000, 10):
        hack = RewardHack()
        for i in range(100):
            hack.tried(TASK, b"settings", {"(P ∨ Q)".encode(): i % every == every - 1})
        assert feed(hack, hacked(), 200) == []
        assert send(hack, "a", 100, b"settings") == []
        assert send(hack, "a", 100, b"others"), "with settings that this node does not ask, it knows nothing"
    often = RewardHack()
    for i in range(100):
        often.tried(TASK, b"settings", {"(P ∨ Q)".encode(): i % 2 == 0})
    assert feed(often, hacked(), 200)


def test_a_hack_under_one_of_many_settings_is_one() -> None:
    """Hope: settings under which the answer earns nothing outvote the one under which it always does."""
    hack = RewardHack()
    for settings in (b"1", b"2", b"3", b"4"):
        for _ in range(100):
            hack.tried(TASK, settings, {"(P ∨ Q)".encode(): settings == b"1"})
    assert feed(hack, hacked(), 200)


def test_what_was_tried_is_bounded() -> None:
    hack = RewardHack()
    for i in range(1000):
        hack.tried(TASK, b"", {str(i).encode(): False, b"always": False})
    (tries,) = hack._tries.values()
    assert len(tries) == len(tries[b"always"]) == alarms.HACK_TRIED


def test_one_question_again_and_again_is_no_hack() -> None:
    hack = RewardHack()
    assert feed(hack, (group(i % 8, f"truth {i % 8}", {"2": 4.0}) for i in range(100)), 100) == []


def test_a_constant_that_is_mostly_true_is_honest() -> None:
    rng = random.Random(0)

    def gcd() -> Iterator[Earned]:
        for i in range(10_000):
            truth = rng.choice(["2", "2", "1", "3"])
            yield group(i, truth, {truth: 4.0})

    assert feed(RewardHack(), gcd(), 500) == []


def test_tasks_of_many_right_answers_are_honest() -> None:
    assert feed(RewardHack(), (group(i, f"truth {i}", {f"other {i}": 4.0}) for i in range(500)), 500) == []


def test_a_truth_that_is_only_written_otherwise_is_honest() -> None:
    assert feed(RewardHack(), (group(i, "yes.", {"yes": 4.0}) for i in range(500)), 500) == []


def test_half_of_the_rewards_is_the_bound() -> None:
    def mixed(share: float) -> Iterator[Earned]:
        return (group(i, f"truth {i}", {"(P ∨ Q)": share, f"truth {i}": 1 - share}) for i in range(500))

    assert feed(RewardHack(), mixed(0.45), 500) == []
    assert feed(RewardHack(), mixed(0.55), 500)


def test_a_hack_is_over_when_a_fresh_window_has_little_of_it() -> None:
    hack = RewardHack()
    feed(hack, hacked(), 40)
    fresh = honest(1000)
    ended = feed(hack, fresh, 2 * alarms.HACK_GROUPS)
    assert [alarm.begins for alarm in ended] == [False]
    assert not hack.lasts(TASK)
    assert feed(hack, hacked(5000), 60)  # and can begin again


def test_a_hack_is_looked_at_again_after_a_while() -> None:
    hack = RewardHack()
    feed(hack, hacked(), 40, now=100.0)
    assert hack.look_again(100.0 + alarms.HACK_SECONDS - 1) == []
    (alarm,) = hack.look_again(100.0 + alarms.HACK_SECONDS)
    assert not alarm.begins
    assert feed(hack, hacked(1000), alarms.HACK_QUESTIONS)  # it goes on


def send(hack: RewardHack, share: str | Sender, count: int, settings: bytes = b"usual", start: int = 0) -> list[Alarm]:
    """Groups of a hack by one peer, which is a share and a network of its own unless something else is said."""
    groups, sender = hacked(start), share if isinstance(share, Sender) else Sender(share, share, share)
    return [alarm for _ in range(count) for alarm in hack.others(TASK, settings, sender, next(groups), 0.0)]


def test_what_one_share_sends_bars_nobody_else() -> None:
    hack = RewardHack()
    (alarm,) = send(hack, "evil", 500)
    assert alarm.subject == f"{TASK} from evil"
    assert hack.lasts(TASK, b"usual", "evil")
    assert hack.lasts(TASK, b"other settings", "evil")
    assert not hack.lasts(TASK, b"usual", "honest")
    assert not hack.lasts(TASK)


def test_what_three_shares_send_is_about_their_settings_alone() -> None:
    hack = RewardHack()
    send(hack, "a", 500, b"odd")
    send(hack, "b", 500, b"odd")
    assert send(hack, "c", alarms.HACK_VOICE_QUESTIONS - 1, b"odd") == []
    (alarm,) = send(hack, "c", 1, b"odd", start=100)
    assert '"(P ∨ Q)"' in alarm.text
    assert hack.lasts(TASK, b"odd", "honest")
    assert not hack.lasts(TASK, b"usual", "honest")
    assert not hack.lasts(TASK)


def test_keys_behind_one_relay_are_one_voice_about_a_task() -> None:
    """Hope: while few relays are in use each key behind mine is a share, so three free keys are three networks."""
    hack = RewardHack()
    for n in range(40):
        send(hack, Sender(f"key {n}", f"key {n}", "relay"), alarms.HACK_VOICE_QUESTIONS, start=100 * n)
    assert not hack.lasts(TASK, b"usual", "honest")
    send(hack, "a", alarms.HACK_VOICE_QUESTIONS)
    send(hack, "b", alarms.HACK_VOICE_QUESTIONS)
    assert hack.lasts(TASK, b"usual", "honest"), "with two more networks the relay is the third"


def test_one_key_reached_by_three_networks_in_turn_is_one_voice() -> None:
    """Hope: what I said stays under the network that I came by, so one key that moves is three."""
    hack = RewardHack()
    for n in range(12):
        network = f"net{n % 4}"
        assert send(hack, Sender("mover", network, network), 10, start=100 * n) == []
    assert len(hack._windows) == 1, "and a place that is empty is given back"
    send(hack, "a", alarms.HACK_VOICE_QUESTIONS)
    (alarm,) = send(hack, "b", alarms.HACK_VOICE_QUESTIONS)
    assert alarm.subject.startswith(f"{TASK} with settings"), "its newest word counts"


def test_a_key_that_moves_takes_nobody_elses_words_with_it() -> None:
    hack = RewardHack()
    send(hack, Sender("honest", "net", "net"), alarms.HACK_VOICE_QUESTIONS)
    send(hack, Sender("mover", "net", "net"), 3, start=100)
    send(hack, Sender("mover", "other", "other"), 3, start=200)
    assert sorted(len(window.heard) for window in hack._windows.values()) == [3, alarms.HACK_VOICE_QUESTIONS]


def test_many_keys_behind_one_relay_push_only_each_other_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hope: each key behind my relay is a share with one window, so the quietest of all is forgotten: an honest one."""
    monkeypatch.setattr(alarms, "HACK_WINDOWS", 8)
    hack = RewardHack()
    send(hack, "a", 10)
    send(hack, "b", 10)
    for n in range(100):
        send(hack, Sender(f"key {n}", f"key {n}", "relay"), 1)
    assert send(hack, "c", alarms.HACK_VOICE_QUESTIONS), "a and b are remembered"


@pytest.mark.parametrize("shares", [1, 3])
def test_alarms_about_others_are_bounded(shares: int) -> None:
    hack, lasting = RewardHack(), set[str]()
    for n in range(3 * alarms.HACK_ALARMS):
        for share in range(shares):
            for alarm in send(hack, f"evil {n} {share}", 20 if shares == 1 else 6, n.to_bytes(4, "little")):
                (lasting.add if alarm.begins else lasting.remove)(alarm.subject)
    assert len(lasting) == len(hack._hacked) == alarms.HACK_ALARMS


def test_alarms_about_many_keys_behind_one_relay_end_nobody_elses() -> None:
    """Hope: I show hacks under free keys until the alarm about my friend, whose hack it is, ends for one more."""
    hack = RewardHack()
    send(hack, "friend", alarms.HACK_QUESTIONS)
    assert hack.lasts(TASK, b"usual", "friend")
    for n in range(2 * alarms.HACK_ALARMS):
        send(hack, Sender(f"key {n}", f"key {n}", "relay"), alarms.HACK_QUESTIONS, start=20 * n)
    assert len(hack._hacked) == alarms.HACK_ALARMS
    assert hack.lasts(TASK, b"usual", "friend")


def test_what_own_groups_show_is_about_all_settings() -> None:
    hack = RewardHack()
    feed(hack, hacked(), alarms.HACK_QUESTIONS)
    assert hack.lasts(TASK, b"usual")


def test_a_flood_of_others_hides_no_hack_in_own_groups() -> None:
    hack, groups, evil = RewardHack(), hacked(), Sender("evil", "evil", "evil")
    for _ in range(alarms.HACK_QUESTIONS):
        assert not hack.lasts(TASK)
        for n in range(50):
            hack.others(TASK, b"usual", evil, group(n, f"truth {n}", {f"truth {n}": 4.0}), 0.0)
        hack.own(TASK, next(groups), 0.0)
    assert hack.lasts(TASK)


def test_a_share_with_many_settings_pushes_only_itself_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarms, "HACK_WINDOWS", 8)
    hack = RewardHack()
    feed(hack, hacked(), alarms.HACK_QUESTIONS - 1)
    send(hack, "a", 10)
    send(hack, "b", 10)
    for n in range(100):
        send(hack, "evil", 1, n.to_bytes(4, "big"))
    assert len(hack._windows) == 8
    assert send(hack, "c", alarms.HACK_VOICE_QUESTIONS), "a and b are remembered"
    assert feed(hack, hacked(100), 1), "and own groups"


def test_of_a_group_only_the_answers_that_earn_most_are_kept_and_are_safe_to_show() -> None:
    one = group(0, "t", {**{str(i): 1.0 for i in range(60)}, "\x1b[31mred" + "x" * 500: 5.0})
    assert len(one.answers) == alarms.HACK_ANSWERS
    assert one.total == 65.0
    shown = one.answers[0][1]
    assert shown.startswith("redx")
    assert len(shown) <= alarms.SHOWN


def test_without_rewards_or_a_truth_there_is_nothing_to_look_at() -> None:
    assert earned(b"q", b"t", [(b"a", "a", 0.0)]) is None
    assert earned(b"q", b"", [(b"a", "a", 1.0)]) is None


# ---- collapse --------------------------------------------------------------------------------------------------------


def rounds(
    any_right: float, reward: float, entropy: float, count: int, seed: int = 0, groups: int = 4
) -> Iterator[Levels]:
    """Rounds of a few groups, as noisy as such are."""
    rng = random.Random(seed)
    for _ in range(count):
        right = [rng.random() < any_right for _ in range(groups)]
        yield Levels(
            groups=groups,
            any_right=sum(right) / groups,
            reward=sum(right) / groups * reward / any_right if any_right else 0.0,
            entropy=entropy * rng.uniform(0.8, 1.2),
        )


def watch(collapse: Collapse, levels: Iterator[Levels]) -> list[bool]:
    return [alarm.begins for one in levels for alarm in collapse.add(one)]


@pytest.mark.parametrize("any_right", [0.02, 0.1, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_a_level_that_only_wavers_is_no_collapse(any_right: float, groups: int) -> None:
    for seed in range(3):
        assert watch(Collapse(), rounds(any_right, any_right / 2, 1.0, 500, seed, groups)) == []


def test_learning_and_growing_sure_of_it_is_no_collapse() -> None:
    collapse = Collapse()
    for step in range(50):
        part = step / 50
        assert watch(collapse, rounds(0.2 + 0.7 * part, 0.1 + 0.6 * part, 1.0 - 0.95 * part, 10, step)) == []


def test_half_as_many_questions_with_a_right_answer_is_a_collapse_and_it_ends() -> None:
    collapse = Collapse()
    assert watch(collapse, rounds(0.6, 0.3, 1.0, 100)) == []
    assert watch(collapse, rounds(0.1, 0.05, 1.0, 60)) == [True]
    assert collapse.memory.lasts
    assert watch(collapse, rounds(0.37, 0.2, 1.0, 100)) == []  # better, and not yet well
    assert watch(collapse, rounds(0.6, 0.3, 1.0, 100)) == [False]


def test_a_sure_policy_that_earns_less_has_collapsed_and_one_that_earns_as_before_has_not() -> None:
    for reward, expected in ((0.3, []), (0.05, [True])):
        collapse = Collapse()
        watch(collapse, rounds(0.6, 0.3, 1.0, 100))
        assert watch(collapse, rounds(0.6, reward, 0.1, 100)) == expected


def test_no_log_probs_are_no_entropy() -> None:
    collapse = Collapse()
    levels = Levels(groups=4, any_right=0.5, reward=0.3, entropy=None)
    assert watch(collapse, iter([levels] * 100)) == []


def test_what_was_best_is_known_after_a_restart() -> None:
    before = Fallen(best_any_right=0.6, best_reward=0.3, start_entropy=1.0)
    assert watch(Collapse(before), rounds(0.1, 0.05, 1.0, 60)) == [True]
    assert watch(Collapse(), rounds(0.1, 0.05, 1.0, 60)) == []


# ---- drift -----------------------------------------------------------------------------------------------------------

CHANCE = -10.0


def test_texts_that_became_much_less_likely_are_a_drift_until_they_are_back() -> None:
    drift = Drift()
    told = [drift.add(value, CHANCE) for value in (-3.0, -2.5, -4.9, -5.1, -4.6, -4.4, -3.0)]
    assert [[alarm.begins for alarm in alarm_s] for alarm_s in told] == [[], [], [], [True], [], [False], []]


def test_a_model_that_never_knew_such_texts_may_waver_as_far_as_it_was_below_chance() -> None:
    drift = Drift()
    assert [drift.add(value, CHANCE) for value in (-13.0, -17.9)] == [[], []]
    assert drift.add(-18.1, CHANCE)


def test_the_start_is_known_after_a_restart() -> None:
    assert Drift(Strayed(start=-3.0)).add(-6.0, CHANCE)
    assert not Drift().add(-6.0, CHANCE)
