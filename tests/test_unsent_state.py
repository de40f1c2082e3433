"""What codecs and strategies keep goes to what takes their place, whenever that is made."""

import pytest

from hvd_hetero.optimizers.accumulated_gradients import AccumulatedGradients
from hvd_hetero.optimizers.exchange_count import ExchangeCount
from hvd_hetero.optimizers.place import Place, Places
from hvd_hetero.optimizers.strategies import StrategyRegistry
from hvd_hetero.optimizers.unsent_state import Count, UnsentState


class Exchange:
    """Keeps one number."""

    def __init__(self, kept=0.0, buckets=1):
        self.kept, self.buckets = kept, buckets

    def state_dict(self):
        return {"kept": self.kept}

    def load_state_dict(self, state):
        self.kept = state["kept"]

    def residuals(self):
        return [self.kept]

    def add_residuals(self, kept, factor):
        if len(kept) != self.buckets:
            return False
        self.kept += kept[0] * factor
        return True


def kept(kinds, unit=1.0):
    unsent_state = UnsentState(keeps=True)
    for kind, exchanges in kinds.items():
        unsent_state.put(kind, exchanges, lambda: unit)
    return unsent_state


def test_each_kind_has_its_own_state_and_waits_for_its_exchanges():
    state = kept({"gradients": [Exchange(1.0)], "merges": [Exchange(2.0), Exchange(3.0)]}).state_dict()
    found = {"gradients": [Exchange()], "merges": [Exchange(), Exchange()]}
    unsent_state = kept({"merges": found["merges"]})
    unsent_state.load_state_dict(state)
    assert unsent_state.state_dict() == state, "also what nobody has taken yet"
    unsent_state.put("gradients", found["gradients"], lambda: 1.0)
    assert [[each.kept for each in group] for group in found.values()] == [[1.0], [2.0, 3.0]]
    assert unsent_state.state_dict() == state


def test_what_is_given_back_counts_as_much_in_another_unit():
    before = kept({"gradients": [Exchange(6.0)], "merges": [Exchange(4.0)]}, unit=2.0).residuals()
    found = {"gradients": [Exchange()], "merges": [Exchange()]}
    unsent_state = kept({"gradients": found["gradients"]}, unit=3.0)
    unsent_state.add_residuals(before)
    assert found["gradients"][0].kept == 4.0 and unsent_state.residuals()["merges"] == ([[4.0]], 2.0)
    unsent_state.put("merges", found["merges"], lambda: 8.0)
    assert found["merges"][0].kept == 1.0
    unsent_state.put("merges", [again := Exchange()], lambda: 8.0)
    assert again.kept == 0.0, "it is given back once"


def test_what_fits_no_exchange_waits_for_one_with_such_buckets():
    unsent_state = kept({"gradients": [other := Exchange(buckets=2)]}, unit=2.0)
    unsent_state.add_residuals({"gradients": ([[6.0]], 1.0)})
    assert other.kept == 0.0
    unsent_state.put("gradients", [fits := Exchange()], lambda: 2.0)
    assert fits.kept == 3.0
    unsent_state.put("gradients", [again := Exchange()], lambda: 2.0)
    assert again.kept == 0.0, "it is given back once"


def test_what_one_of_several_exchanges_has_taken_is_not_sent_once_more():
    unsent_state = kept({"merges": [first := Exchange(), Exchange(buckets=2)]})
    unsent_state.add_residuals({"merges": ([[3.0], [5.0]], 1.0)})
    assert first.kept == 3.0
    unsent_state.put("merges", again := [Exchange(), Exchange()], lambda: 1.0)
    assert [each.kept for each in again] == [0.0, 0.0]


def test_codecs_that_send_all_may_have_a_state():
    unsent_state = UnsentState(keeps=False)
    unsent_state.put("gradients", [Exchange(1.0)], lambda: 1.0)
    assert unsent_state.state_dict() == {"gradients": [{"kept": 1.0}]} and unsent_state.residuals() == {}


def test_what_was_given_back_and_nobody_has_taken_yet_is_in_a_state():
    unsent_state = UnsentState()
    unsent_state.add_residuals({"gradients": ([[4.0]], 2.0)})
    later = UnsentState()
    later.load_state_dict(unsent_state.state_dict())
    assert later.state_dict() == unsent_state.state_dict() and later.residuals() == unsent_state.residuals()
    later.put("gradients", [taker := Exchange()], lambda: 1.0)
    assert taker.kept == 8.0 and later.state_dict() == {"gradients": [{"kept": 8.0}]}
    later.load_state_dict({"gradients": [{"kept": 1.0}]})
    assert taker.kept == 1.0


def test_of_a_state_that_waits_it_is_known_later_what_is_not_sent_yet():
    unsent_state = UnsentState()
    unsent_state.load_state_dict({"gradients": [{"kept": 3.0}]})
    committed = unsent_state.residuals()
    assert committed == {}
    unsent_state.put("gradients", [exchange := Exchange()], lambda: 2.0)
    exchange.kept = 5.0
    assert committed == {"gradients": ([[3.0]], 2.0)}, "what there was at the commit"
    unsent_state.put("gradients", [Exchange(7.0)], lambda: 2.0)
    unsent_state.load_state_dict({"gradients": [{"kept": 9.0}]})
    assert committed == {"gradients": ([[3.0]], 2.0)}, "nor is it that of another state"
    fresh = UnsentState()
    assert (begun := fresh.residuals()) == {}
    fresh.put("gradients", [Exchange(7.0)], lambda: 2.0)
    assert begun == {}, "nothing was kept back then"


def test_what_is_made_later_takes_what_waits_in_its_place():
    def keepers(*kinds):
        made = Places(UnsentState)
        return made, [take(made, kind) for kind in kinds]

    def take(made, kind, kept=0.0):
        exchange = Exchange(kept)
        made.take(kind).put("gradients", [exchange], lambda: 1.0)
        return exchange

    before, found = keepers("optimizer", "tape topk", "tape topk", "tape int8")
    for number, exchange in enumerate(found):
        exchange.kept = number + 1.0
    state = before.state_dict()
    later, (first,) = keepers("optimizer")
    later.load_state_dict(state)
    assert first.kept == 1.0 and later.state_dict() == state, "also what nobody has taken yet"
    again, _ = keepers()
    again.load_state_dict(later.state_dict())
    taken = [take(again, kind).kept for kind in ("tape int8", "tape topk", "optimizer", "tape topk", "tape topk")]
    assert taken == [4.0, 2.0, 1.0, 3.0, 0.0], "whatever is made first; and nothing goes to two"
    again.load_state_dict({"tape topk 2": state["tape topk 1"]})
    assert again.named["tape topk 2"].residuals() == {"gradients": ([[3.0]], 1.0)}

    rebuilt, _ = keepers("optimizer")
    kept = {name: unsent_state.residuals() for name, unsent_state in before.named.items()}
    for name, unsent_state in rebuilt.expect(kept).items():
        unsent_state.add_residuals(kept[name])
    assert [take(rebuilt, kind).kept for kind in ("tape int8", "tape topk")] == [4.0, 2.0]
    assert rebuilt.expect(()).keys() == {"optimizer 0", "tape int8 0", "tape topk 0"}, "nobody waits for the last"


def test_what_is_removed_leaves_its_place_to_the_next():
    made = Places(UnsentState)
    first, second = made.take("optimizer"), made.take("optimizer")
    made.remove(first)
    made.remove(first)
    assert made.named == {"optimizer 0": second}
    assert made.take("optimizer") is made.named["optimizer 1"]


def test_a_successor_has_the_place_of_the_first_that_it_succeeds():
    made = Places(UnsentState)
    before = [made.take("optimizer") for _ in range(4)]
    successor = made.take("optimizer")
    for one in (before[1], before[2]):
        made.succeed(successor, one)
        made.remove(one)
    assert list(made.named.values()) == [before[0], successor, before[3]]


class Momentum:
    """A strategy."""

    def __init__(self, value=0.0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]

    def restart(self):
        self.value = 0.0

    def fits(self, state):
        return self.value >= 0.0


def at(name):
    return Place(lambda: name)


def test_a_strategy_that_is_made_anew_or_later_goes_on():
    strategies = StrategyRegistry()
    strategies.add(at("optimizer 0"), Momentum(1.0))
    strategies.restart()
    strategies.add(at("optimizer 0"), again := Momentum())
    assert again.value == 1.0
    later = StrategyRegistry()
    later.load_state_dict(strategies.state_dict())
    assert later.state_dict() == strategies.state_dict() == {"optimizer 0": {"value": 1.0}}
    later.add(at("optimizer 0"), last := Momentum())
    assert last.value == 1.0


def test_a_strategy_of_which_a_state_knows_nothing_begins_anew():
    strategies = StrategyRegistry()
    strategies.add(at("optimizer 0"), first := Momentum(1.0))
    strategies.add(place := at("optimizer 1"), second := Momentum(2.0))
    strategies.load_state_dict({"optimizer 1": {"value": 3.0}})
    assert (first.value, second.value) == (0.0, 3.0)
    strategies.remove(place)
    assert strategies.state_dict() == {"optimizer 0": {"value": 0.0}}


@pytest.mark.parametrize(("value", "expected"), [(0.0, 1.0), (-2.0, -2.0)])
def test_a_strategy_goes_on_with_the_one_that_it_takes_over_if_that_fits(value, expected):
    strategies = StrategyRegistry()
    strategies.add(before := at("optimizer 0"), Momentum(1.0))
    strategies.hand_over(before, to=at("optimizer 0"))
    strategies.remove(before)
    strategies.add(at("optimizer 0"), after := Momentum(value))
    assert after.value == expected
    strategies.add(at("optimizer 0"), again := Momentum())
    assert again.value == 0.0, "it is handed over once"


def test_what_is_made_anew_in_another_order_has_the_place_that_it_had():
    made = Places(UnsentState)
    second, first = made.take("optimizer", 1), made.take("optimizer", 0)
    assert made.named == {"optimizer 0": first, "optimizer 1": second}
    assert made.place_of(second) == ("optimizer", 1)
    other = Places(UnsentState)
    third = other.take("optimizer", 2)
    assert [other.place_of(other.take("optimizer")) for _ in range(3)] == [("optimizer", place) for place in (0, 1, 3)]
    assert other.named["optimizer 2"] is third


def counted():
    return ExchangeCount(lambda: 0, 4)


class GradientAccumulator:
    """Adds up numbers."""

    def __init__(self):
        self.held = None

    def sums(self):
        return self.held

    def load_sums(self, sums):
        self.held = sums


def test_partial_sums_wait_for_what_adds_them_up_and_are_counted_once():
    sums = AccumulatedGradients(count := counted())
    sums.put("a", first := GradientAccumulator())
    sums.put("b", GradientAccumulator())
    count.begun, first.held = 2, {"passes": 2, "apart": True}
    state = sums.state_dict()
    assert state == {"begun": 2, "kinds": {"a": {"passes": 2, "apart": True}}}
    count.begun, first.held = 3, {"passes": 3, "apart": True}
    sums.load_state_dict(state)
    assert sums.state_dict() == state, "what came later is gone"

    later = AccumulatedGradients(counted())
    later.load_state_dict(state)
    assert later.begun == 2 and later.state_dict() == state, "also what nobody has taken yet"
    later.put("a", taker := GradientAccumulator())
    assert taker.held == first.held and later.state_dict() == state
    later.put("a", again := GradientAccumulator())
    assert again.held is None, "it is handed over once"


def test_partial_sums_of_what_is_made_later_wait_in_its_place():
    state = {"optimizer 0": {"begun": 2, "kinds": {"a": {"passes": 2}}}, "optimizer 1": {"begun": 1, "kinds": {}}}
    made = Places(AccumulatedGradients)
    made.load_state_dict(state)
    assert made.state_dict() == state
    sums = made.take("optimizer")
    sums.follow(count := counted())
    sums.put("a", adder := GradientAccumulator())
    assert count.begun == 2 and adder.held == {"passes": 2} and made.state_dict() == state
    count.begun = 3
    assert sums.begun == 3
    made.load_state_dict({})
    assert sums.begun == 0 and adder.held is None and made.named == {"optimizer 0": sums}


def test_partial_sums_on_other_ranks_are_of_steps_that_all_of_them_decide_upon():
    sums = AccumulatedGradients(counted())
    sums.restore({"begun": 2, "kinds": {"a": {"passes": 2, "apart": True}}}, begun=3)
    sums.put("a", adder := GradientAccumulator())
    assert adder.held == {"passes": 2} and sums.begun == 3
    sums.load_state_dict({})
    assert adder.held is None and sums.begun == 0


def test_exchanges_of_which_a_state_knows_nothing_begin_anew():
    """As one of before the first exchange, where that is made with the first gradients only."""
    state = kept({"gradients": [Exchange(1.0)]}).state_dict()
    found = {"gradients": [Exchange()], "merges": [Exchange()]}
    live = kept(found)
    found["gradients"][0].kept, found["merges"][0].kept = 2.0, 3.0
    live.load_state_dict(state)
    assert [found["gradients"][0].kept, found["merges"][0].kept] == [1.0, 0.0]


def test_a_count_of_which_a_state_knows_nothing_begins_anew():
    unsent_state, count = UnsentState(), Count(3.0)
    before = unsent_state.state_dict()
    unsent_state.put_count("samples", count)
    count.value = 5.0
    after = unsent_state.state_dict()
    unsent_state.load_state_dict(before)
    assert count.value == 3.0
    unsent_state.load_state_dict(after)
    assert count.value == 5.0
    unsent_state.put_count("samples", later := Count(0.0))
    assert later.value == 0.0, "and takes what waits only where something does"


def test_the_first_optimizer_to_step_apart_leads_until_its_steps_are_over():
    """A plan that came with either one's merges would hold from another batch on each rank."""
    strategies, first, second = StrategyRegistry(), object(), object()
    strategies.begins(first)
    strategies.begins(second)
    assert strategies.leads(first) and not strategies.leads(second)
    strategies.ends(second)
    assert strategies.leads(first)
    strategies.ends(first)
    assert not strategies.lead
