"""What ranks rebuild together, as they have become others: the same on all of them, whatever lives on."""

import functools
import gc
import sys
import weakref

import pytest

from hvd_hetero.engine.callback import Rebuilds, WeakMethods
from hvd_hetero.engine.local import World
from hvd_hetero.engine.payload import gather_text


@pytest.fixture(autouse=True)
def what_other_tests_have_left_is_not_looked_through():
    gc.freeze()
    yield
    gc.unfreeze()


class Made:
    def __init__(self, rebuilds, name, by_all=True):
        self.name = name
        rebuilds.add(self.rebuild, by_all=by_all)

    def rebuild(self):
        return self.name


def settled(engine, rebuilds):
    """The names of what is rebuilt."""
    gathered = functools.partial(gather_text, engine, name="made")
    return [method() for method in rebuilds.agree(gathered)]


def all_alike(found):
    assert len(set(map(tuple, found))) == 1, found
    return found[0]


def test_what_lives_on_one_rank_alone_is_not_rebuilt():
    def rank(engine):
        rebuilds = Rebuilds()
        assert settled(engine, rebuilds) == []
        first = Made(rebuilds, "first")
        stray = Made(rebuilds, "stray")
        last = Made(rebuilds, "last")
        if engine.rank != 1:
            del stray
        return settled(engine, rebuilds), settled(engine, rebuilds), first, last

    once, again, *_ = zip(*World(3).run(rank), strict=True)
    assert all_alike(once) == ["first", "last"] == all_alike(again)


def test_what_nothing_holds_any_more_is_not_rebuilt():
    def rank(engine):
        rebuilds = Rebuilds()
        kept, rubbish = Made(rebuilds, "kept"), Made(rebuilds, "rubbish")
        rubbish.itself = rubbish
        del rubbish
        return settled(engine, rebuilds), kept

    gc.disable()  # whether such rubbish was collected yet differs between ranks
    try:
        assert all_alike([names for names, _ in World(1).run(rank)]) == ["kept"]
    finally:
        gc.enable()


@pytest.mark.parametrize("joins", [False, True])
def test_who_joins_makes_what_was_made_before_train_and_no_more(joins):
    """What a `train` has made that broke off is rebuilt among those alone who have it."""

    def rank(engine):
        fresh = joins and engine.rank == 2
        rebuilds, held = Rebuilds(), []
        if not fresh:
            settled(engine.group((0, 1)) if joins else engine, rebuilds)
            held.append(Made(rebuilds, "before"))
            rebuilds.begin_train()
            held += [Made(rebuilds, "within")]
        names = settled(engine, rebuilds)
        if fresh:
            held.append(Made(rebuilds, "before"))
        rebuilds.begin_train()
        held.append(Made(rebuilds, "within again"))
        return names, settled(engine, rebuilds)

    then, later = zip(*World(3).run(rank), strict=True)
    if joins:
        assert then == (["before"], ["before"], [])
        assert all_alike(later) == ["before", "within again"], "number by number, although one has made less"
    else:
        assert all_alike(then) == ["before", "within"]
        assert all_alike(later) == ["before", "within", "within again"]


def test_what_some_ranks_have_made_for_themselves_is_theirs_to_rebuild():
    def rank(engine):
        rebuilds, held = Rebuilds(), []
        settled(engine, rebuilds)
        if engine.rank < 2:
            held.append(Made(rebuilds, "of two", by_all=False))
        held.append(Made(rebuilds, "of all"))
        rebuilds.add(held[-1].rebuild, by_all=True)
        return settled(engine, rebuilds)

    assert World(3).run(rank) == [["of two", "of all"], ["of two", "of all"], ["of all"]]


def test_what_dies_with_its_class_prints_no_error(monkeypatch):
    """A distributed optimizer has a class of its own. It may be dropped while its garbage is collected: by another
    thread, or here by something that is collected with it."""
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    rebuilds = Rebuilds()
    own = type("Own", (Made,), {})
    dies = own(Rebuilds(), "it")
    dies.other = other = Made(rebuilds, "other")
    own.rebuild = lambda self: None
    own.instance = dies
    rebuilds.add(dies.rebuild, by_all=True)
    drops = weakref.ref(other, lambda reference: Made(rebuilds, "next"))
    del dies, other, own
    gc.collect()
    assert drops() is None and not errors


def test_without_anything_to_call_not_all_objects_are_looked_through():
    """That takes tenths of a second, of each `init()`; to shut down calls methods that need no other rank."""
    collections = []
    gc.disable()
    gc.callbacks.append(lambda phase, info: collections.append(phase))
    try:
        assert Rebuilds().agree(lambda mine: [mine]) == []
        WeakMethods().call()
    finally:
        gc.callbacks.pop()
        gc.enable()
    assert collections == []
