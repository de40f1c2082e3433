"""The edits made to Horovod's source: one by one, all together, and on the real source."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from hvd_hetero.cli import doctor, edits, wheel
from hvd_hetero.cli.edits import Edit, EditFailed

EVERYTHING = ("torch", "tensorflow", "f16c", "one_abi")


def edit(**changes: object) -> Edit:
    texts = {"name": "n", "reason": "r", "file": "f.cc", "find": "old", "replace": "new"}
    return Edit(**{**texts, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real source of Horovod, where pip can bring it."""
    folder = tmp_path_factory.mktemp("sdist")
    try:
        return wheel.unpack(wheel.download(folder), folder / "unpacked")
    except wheel.DownloadFailed as error:
        pytest.skip(str(error).splitlines()[0])


@pytest.fixture
def source(unpacked: Path, tmp_path: Path) -> Path:
    """A copy of those files of the real source that are edited."""
    for name in {e.file for e in edits.all_edits()}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if (unpacked / name).exists():  # an edit may make a file
            shutil.copyfile(unpacked / name, tmp_path / name)
    return tmp_path


def test_an_edit_replaces_its_text_as_often_as_it_says() -> None:
    assert edits.replaced("old and old", edit(count=2)) == "new and new"


@pytest.mark.parametrize(("text", "found"), [("nothing here", 0), ("old old", 2)])
def test_a_text_not_found_or_found_too_often_is_refused(text: str, found: int) -> None:
    with pytest.raises(EditFailed, match=rf"edit 'n' expected its text 1 time\(s\) in f.cc, and found it {found} time"):
        edits.replaced(text, edit())


@pytest.mark.parametrize(
    "change",
    [{"reason": ""}, {"find": ""}, {"creates": True}, {"count": 0}, {"replace": "old"}, {"needs": ("f16",)}],
)
def test_an_edit_without_sense_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="edit"):
        edit(**change)


def test_all_edits_are_made_or_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old\r\n")
    (tmp_path / "b").write_bytes(b"other\n")
    with pytest.raises(EditFailed, match="Nothing was built"):
        edits.apply([edit(name="one", file="a"), edit(name="two", file="b")], tmp_path)
    assert (tmp_path / "a").read_bytes() == b"old\r\n"
    with pytest.raises(EditFailed, match="the file c"):
        edits.apply([edit(file="c")], tmp_path)
    assert edits.apply([edit(name="one", file="a")], tmp_path) == ["one"]
    assert (tmp_path / "a").read_bytes() == b"new\r\n"


def test_an_edit_may_make_a_file_but_not_over_another(tmp_path: Path) -> None:
    made = edit(file="new.cc", find="", replace="all of it", creates=True)
    assert edits.apply([made], tmp_path) == ["n"]
    assert (tmp_path / "new.cc").read_text() == "all of it"
    with pytest.raises(EditFailed, match="expected no file new.cc"):
        edits.apply([made], tmp_path)


@pytest.mark.parametrize("plain", [False, True])
def test_every_edit_fits_the_real_source(source: Path, plain: bool) -> None:
    chosen = edits.chosen(EVERYTHING, plain=plain)
    assert edits.apply(chosen, source) == edits.names(chosen)
    for file in {each.file for each in chosen if each.file.endswith(".py")}:
        ast.parse((source / file).read_text(), file)
    # what replaces a text holds it or has taken its place: a second round would find something else
    with pytest.raises(EditFailed):
        edits.apply(chosen, source)


def test_plain_leaves_only_what_is_needed_to_compile() -> None:
    assert {e.kind for e in edits.chosen(EVERYTHING, plain=True)} == {"compile"}
    assert {e.kind for e in edits.chosen(EVERYTHING)} == {"compile", "repair", "speed"}


def test_an_edit_is_left_out_where_what_it_needs_is_missing() -> None:
    assert "vectorised_half" not in edits.names(edits.chosen(["torch", "tensorflow"]))
    assert "no_xla_file" not in edits.names(edits.chosen(["torch", "f16c"]))
    assert "blocking_wait" not in edits.names(edits.chosen(["tensorflow", "f16c"]))


def test_edits_of_one_name_are_of_one_kind_and_need_the_same() -> None:
    table: dict[str, set[object]] = {}
    for each in edits.all_edits():
        table.setdefault(each.name, set()).add((each.kind, each.needs))
    assert all(len(kinds) == 1 for kinds in table.values()), table


def test_the_doctor_knows_what_each_missing_repair_means() -> None:
    assert set(doctor.WITHOUT) == set(edits.names(e for e in edits.all_edits() if e.kind != "compile"))


def test_speed_edits_wait_for_a_variable() -> None:
    for name in edits.names(e for e in edits.all_edits() if e.kind == "speed"):
        assert any("HOROVOD_" in e.replace and "nv" in e.replace for e in edits.all_edits() if e.name == name)


def test_a_peer_that_sends_is_cut_off_before_the_memory_goes_that_it_sends_to() -> None:
    """Where another rank has died, this one drops a hierarchy while its peers are in the midst of an all-reduce."""
    disconnect = next(e.replace for e in edits.all_edits() if "void Disconnect()" in e.replace)
    assert 0 < disconnect.find("ctx->closeConnections()") < disconnect.find("hierarchy.reset()")
    alone = next(e.replace for e in edits.all_edits() if "if (!peers_reachable)" in e.replace)
    assert 0 < alone.find("gloo_context.Disconnect()") < alone.find("DeregisterProcessSet(id)")


def test_the_hash_follows_every_text() -> None:
    base = edits.text_hash([edit()])
    assert base == edits.text_hash([edit(reason="another")])
    for change in ({"find": "x"}, {"replace": "x"}, {"file": "x"}, {"count": 2}):
        assert edits.text_hash([edit(**change)]) != base
