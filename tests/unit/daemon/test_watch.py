"""Changed files of a folder: what is news and what is not, with real inotify and time at hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seedance.daemon.watch import Debounce, FolderWatch, look_up, read_events
from seedance.errors import KernelError


class Timer:
    """A handle as `call_at` returns it."""

    def __init__(self, due_s: float, act: Callable[[], None]) -> None:
        self.due_s = due_s
        self.act = act
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """As much of an event loop as a watch uses; the kernel queues an event before the system call returns."""

    def __init__(self) -> None:
        self.now = 100.0
        self.readers: dict[int, Callable[[], None]] = {}
        self.timers: list[Timer] = []

    def add_reader(self, fd: int, read: Callable[[], None]) -> None:
        self.readers[fd] = read

    def remove_reader(self, fd: int) -> None:
        self.readers.pop(fd, None)

    def time(self) -> float:
        return self.now

    def call_at(self, due_s: float, act: Callable[[], None]) -> Timer:
        self.timers.append(Timer(due_s, act))
        return self.timers[-1]

    def due_s(self) -> float | None:
        """Read what there is; return when the callback is due."""
        for read in list(self.readers.values()):
            read()
        due = [timer.due_s for timer in self.timers if not timer.cancelled]
        assert len(due) <= 1
        return due[0] if due else None

    def act(self) -> None:
        (timer,) = [timer for timer in self.timers if not timer.cancelled]
        self.timers.clear()
        timer.act()


class Watched:
    """A folder `tenants.d` below a folder of the test's, watched for `*.toml`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "etc" / "tenants.d"
        self.calls = 0
        self.loop: Any = Loop()
        self.watch: FolderWatch | None = None

    def start(self) -> None:
        self.watch = FolderWatch(str(self.folder), self.loop, self._changed, suffix=".toml")

    def _changed(self) -> None:
        self.calls += 1

    def is_news(self) -> bool:
        """Whether anything has happened since the last time that this was asked."""
        if self.loop.due_s() is None:
            return False
        before = self.calls
        self.loop.act()
        assert self.calls == before + 1
        return True


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A folder with one tenant, watched."""
    watched = Watched(tmp_path)
    watched.folder.mkdir(parents=True)
    (watched.folder / "acme.toml").write_text("old")
    watched.start()
    yield watched
    assert watched.watch is not None
    watched.watch.close()
    watched.watch.close()
    assert watched.loop.readers == {}


def _write(path: Path) -> None:
    path.write_text("new")


def _rename_into_place(path: Path) -> None:
    new = path.with_name(".acme.toml.1234")
    new.write_text("new")
    new.replace(path)


def _as_vim_does(path: Path) -> None:
    path.with_name("4913").write_text("")
    path.with_name("4913").unlink()
    path.rename(path.with_name("acme.toml~"))
    path.write_text("new")
    path.with_name("acme.toml~").unlink()


def _hard_link(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("new")
    os.link(other, path.with_name("new.toml"))


@pytest.mark.parametrize(
    "change",
    [
        _write,
        _rename_into_place,
        _as_vim_does,
        _hard_link,
        lambda path: path.unlink(),
        lambda path: path.rename(path.with_suffix(".off")),
        lambda path: path.rename(path.parent.parent / "acme.toml"),
        lambda path: path.chmod(0o600),
        lambda path: path.with_name("new.toml").symlink_to("/elsewhere"),
        lambda path: path.with_name("..data").symlink_to("/elsewhere"),
    ],
)
def test_a_file_that_is_complete_or_gone_is_news(watched: Watched, change: Callable[[Path], object]) -> None:
    assert not watched.is_news()
    change(watched.folder / "acme.toml")
    assert watched.is_news()
    assert not watched.is_news()


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.read_text(),
        lambda path: path.with_name(".acme.toml.swp").write_text("x"),
        lambda path: (path.parent / "folder").mkdir(),
        lambda path: (path.parent.parent / "seedanced.toml").write_text("x"),
        lambda path: (path.parent.parent / "tenants.e").mkdir(),
    ],
)
def test_everything_else_is_not(watched: Watched, change: Callable[[Path], object]) -> None:
    change(watched.folder / "acme.toml")
    assert not watched.is_news()


def test_a_file_is_news_when_its_writer_closes_it(watched: Watched) -> None:
    with (watched.folder / "new.toml").open("w") as file:
        assert not watched.is_news()  # it has been created
        file.write("half")
        file.flush()
        assert not watched.is_news()
    assert watched.is_news()


def test_a_burst_is_one_call_when_it_has_ended(watched: Watched) -> None:
    for _ in range(3):
        _write(watched.folder / "acme.toml")
        assert watched.loop.due_s() == pytest.approx(watched.loop.now + 0.05)
        watched.loop.now += 0.04
    watched.loop.act()
    assert watched.calls == 1


def test_a_burst_without_end_is_a_call_each_time_it_has_lasted_long() -> None:
    debounce = Debounce(0.05, 0.3)
    assert debounce.touched(10.0) == pytest.approx(10.05)
    assert debounce.touched(10.04) == pytest.approx(10.09)
    assert debounce.touched(10.27) == pytest.approx(10.3)
    debounce.acted()
    assert debounce.touched(10.31) == pytest.approx(10.36)


def test_the_folder_may_go_and_come_again(watched: Watched) -> None:
    (watched.folder / "acme.toml").unlink()
    watched.folder.rmdir()
    assert watched.is_news()
    assert not watched.is_news()
    watched.folder.mkdir()
    assert watched.is_news()
    _write(watched.folder / "acme.toml")
    assert watched.is_news()


def test_folders_on_the_way_may_go_and_come_again(watched: Watched) -> None:
    etc = watched.folder.parent
    etc.rename(etc.with_name("old"))
    assert watched.is_news()
    _write(etc.with_name("old") / "tenants.d" / "acme.toml")
    assert not watched.is_news()
    etc.mkdir()
    watched.loop.due_s()
    watched.folder.mkdir()
    assert watched.is_news()
    _write(watched.folder / "acme.toml")
    assert watched.is_news()


def test_another_folder_may_take_its_place(watched: Watched) -> None:
    new = watched.folder.with_name("new")
    new.mkdir()
    watched.folder.rename(watched.folder.with_name("old"))
    new.rename(watched.folder)
    assert watched.is_news()
    _write(watched.folder / "acme.toml")
    assert watched.is_news()


@pytest.mark.parametrize("is_absolute", [False, True])
def test_the_folder_may_be_a_link_that_leads_elsewhere_later(tmp_path: Path, is_absolute: bool) -> None:
    watched = Watched(tmp_path)
    places = tmp_path / "first", tmp_path / "second"
    for place in places:
        place.mkdir()
    watched.folder.parent.mkdir()

    def target(place: Path) -> Path:
        return place if is_absolute else Path("..", place.name)

    watched.folder.symlink_to(target(places[0]))
    watched.start()
    assert watched.watch is not None
    with contextlib.closing(watched.watch):
        _write(places[0] / "acme.toml")
        assert watched.is_news()
        _write(places[1] / "acme.toml")
        assert not watched.is_news()
        new = watched.folder.with_name("new")
        new.symlink_to(target(places[1]))
        new.replace(watched.folder)
        assert watched.is_news()
        _write(places[1] / "acme.toml")
        assert watched.is_news()
        _write(places[0] / "acme.toml")
        assert not watched.is_news()


def test_what_leads_nowhere_is_watched_until_it_leads_somewhere(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.start()
    assert watched.watch is not None
    with contextlib.closing(watched.watch):
        watched.folder.parent.write_text("a file")
        assert watched.is_news()
        watched.folder.parent.unlink()
        assert watched.is_news()
        watched.folder.parent.symlink_to("etc")  # to itself
        assert watched.is_news()
        watched.folder.parent.unlink()
        watched.folder.mkdir(parents=True)
        assert watched.is_news()
        _write(watched.folder / "acme.toml")
        assert watched.is_news()


def test_after_an_overflow_anything_may_have_changed(watched: Watched) -> None:
    most = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    if most > 100_000:
        pytest.skip("the kernel's queue is too long to fill here")
    path, other = watched.folder / "a", watched.folder / "b"
    path.write_text("")
    for _ in range(most // 2 + 1):  # two events each, that are no news by themselves
        path.rename(other)
        path, other = other, path
    _write(watched.folder / "acme.toml")  # is lost
    while not watched.is_news():
        pass
    while watched.loop.due_s() is not None:
        watched.loop.act()
    _write(watched.folder / "acme.toml")
    assert watched.is_news()


def test_no_watch_is_left_behind(watched: Watched) -> None:
    def count() -> int:
        assert watched.watch is not None
        (fd,) = watched.loop.readers
        return Path(f"/proc/self/fdinfo/{fd}").read_text().count("inotify wd:")

    before = count()
    for _ in range(3):
        watched.folder.rename(watched.folder.with_name("old"))
        assert watched.is_news()
        assert count() == before - 1
        watched.folder.with_name("old").rename(watched.folder)
        assert watched.is_news()
        assert count() == before


def test_a_lookup_passes_links_and_folders(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("./real/../real")
    passed, place = look_up(f"{tmp_path}//link/./x")
    root = str(tmp_path)
    assert passed[-4:] == [(root, "link"), (root, "real"), (root, "real"), (f"{root}/real", "x")]
    assert passed[0][0] == "/"
    assert place == f"{root}/real/x"


def test_events_are_read_whatever_follows_their_names() -> None:
    events = (1, b"a.toml\0\0"), (2, b""), (-1, b"\0")
    data = b"".join(struct.pack("iIII", number, 8, 0, len(name)) + name for number, name in events)
    assert [(event.watch, event.name) for event in read_events(data)] == [(1, "a.toml"), (2, ""), (-1, "")]


def test_without_a_descriptor_there_is_no_watch(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        with pytest.raises(KernelError, match="cannot watch for changed files: Too many open files"):
            FolderWatch(str(tmp_path), Loop(), int)  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_link_to_where_it_is_makes_one_folder_of_two(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.folder.parent.mkdir()
    watched.folder.symlink_to(".")
    watched.start()
    assert watched.watch is not None
    with contextlib.closing(watched.watch):
        _write(watched.folder.parent / "acme.toml")
        assert watched.is_news()
        watched.folder.unlink()
        assert watched.is_news()
        _write(watched.folder.parent / "acme.toml")
        assert not watched.is_news()


def test_from_a_saved_file_to_the_call_in_a_real_loop(tmp_path: Path) -> None:
    async def save() -> float:
        called = asyncio.Event()
        folder = FolderWatch(str(tmp_path), asyncio.get_running_loop(), called.set, suffix=".toml")
        with contextlib.closing(folder):
            started = time.monotonic()
            _rename_into_place(tmp_path / "acme.toml")
            await asyncio.wait_for(called.wait(), 10)
            return time.monotonic() - started

    assert 0.05 <= asyncio.run(save()) < 0.5
