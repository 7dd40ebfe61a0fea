"""One model in the place of another, with the whole daemon; the synthetic engine plays models by their seeds."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.daemon import Daemon, Http, running, wait_until
from support.model_dir import synthetic_model, write_manifest, write_model
from support.synthetic import MODEL, expected_ids, expected_text, prompt_ids

from seedance.daemon import control, ctl
from seedance.daemon.client import ApiRefused
from seedance.engine.model_load import LoadPhase, LoadState
from seedance.engine.synthetic_stream import expected_token_ids
from seedance.engine.synthetic_vocabulary import decode_text

SEEDS = {"a": 1, "b": 2}
LONGEST_WAIT_S = 0.2
PROMPT = "Once upon a time"
TOKENS = 40
SWAPS = 20
CLIENTS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, seed in SEEDS.items():
        write_manifest(synthetic_model(folder / name, seed, max_position_embeddings=4096 * seed))
    return folder


def tables(folder: Path, **engine: Any) -> dict[str, dict[str, Any]]:
    return {
        "engine": {"kind": "synthetic", "model": str(folder / "a"), "name": MODEL, **engine},
        "engine.synthetic": {"tokens_per_s": 200},
    }


@pytest.fixture(scope="module")
def shared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("d"), "acme", "globex", tables=tables(folder)) as daemon:
        yield daemon
        daemon.stop()


@pytest.fixture
def daemon(shared: Daemon, folder: Path) -> Iterator[Daemon]:
    """A daemon that serves a, before and after."""
    assert ask(shared) == expected_text(PROMPT, TOKENS, SEEDS["a"])
    yield shared
    report = served(shared)
    assert report.model is not None
    if (report.source, report.model.name) != (str(folder / "a"), MODEL):
        load(shared, folder / "a", "--name", MODEL)
    wait_until(shared.is_at_rest)


def run(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = ctl.run(["--config", str(daemon.config), *arguments])
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def load(daemon: Daemon, path: Path, *options: str, wait: bool = True) -> LoadState:
    """Load a model, which must go well; returns how it went."""
    done = run(daemon, "model", "load", str(path), "--json", *options, *(["--wait"] if wait else []))
    assert done.returncode == 0, done.stderr
    return msgspec.json.decode(done.stdout, type=LoadState)


def served(daemon: Daemon) -> control.ModelReport:
    reply = daemon.ask(control.GetModel())
    assert isinstance(reply, control.ModelReport)
    return reply


def ask(daemon: Daemon, tokens: int = TOKENS, *, prompt: str = PROMPT, model: str = MODEL) -> str:
    return "".join(daemon.client("acme").infer(prompt, model=model, max_tokens=tokens))


class Running:
    """A stream that was begun, in a thread of its own; its first text has come."""

    def __init__(self, daemon: Daemon, tokens: int) -> None:
        self._tokens = tokens
        self._parts = daemon.client("acme").infer(PROMPT, model=MODEL, max_tokens=tokens)
        self._text = [next(self._parts)]
        self._thread = threading.Thread(target=lambda: self._text.extend(self._parts))
        self._thread.start()

    def text(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return "".join(self._text)


def cut_over(text: str, tokens: int) -> int:
    """Return after how many tokens of a the rest of a text is what b makes of it."""
    first = expected_ids(PROMPT, tokens, SEEDS["a"])
    for count in range(tokens + 1):
        so_far = first[:count]
        rest = expected_token_ids(SEEDS["b"], prompt_ids(PROMPT) + so_far, tokens - count)
        if decode_text(so_far + rest) == text:
            return count
    raise AssertionError("the text is of neither model, nor of one after the other")


class Load:
    """Clients of both tenants that ask again and again; each text must be a model's, and whole."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._stop = threading.Event()
        self.counts = dict.fromkeys(SEEDS, 0)
        self.waits: list[tuple[float, float]] = []  # when a request began, and how long its first text took
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask_on, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask_on(self, number: int) -> None:
        client = self._daemon.client(("acme", "globex")[number % 2])
        for turn in itertools.count():
            if self._stop.is_set():
                return
            prompt = f"{PROMPT}, {number} and {turn}"
            began_s = time.monotonic()
            parts: list[str] = []
            try:
                for part in self._texts(client, prompt, number):
                    if not parts and part:
                        self.waits.append((began_s, time.monotonic() - began_s))
                    parts.append(part)
            except Exception as exc:  # whatever it is, it must not happen
                self.failures.append(repr(exc))
                return
            self._judge(prompt, number, "".join(parts))

    @staticmethod
    def _texts(client: Any, prompt: str, number: int) -> Iterator[str]:
        if number % 3:
            yield from client.infer(prompt, model=MODEL, max_tokens=TOKENS)
        else:
            yield from client.chat([{"role": "user", "content": prompt}], model=MODEL, max_tokens=TOKENS)

    def _judge(self, prompt: str, number: int, text: str) -> None:
        asked: Any = prompt if number % 3 else [{"role": "user", "content": prompt}]
        for name, seed in SEEDS.items():
            if text == expected_text(asked, TOKENS, seed):
                self.counts[name] += 1
                return
        self.failures.append(f"neither model's: {text!r}")

    def longest_wait_s(self, since_s: float) -> float:
        """Return the longest wait of the requests that began since then."""
        return max((wait_s for began_s, wait_s in self.waits if began_s >= since_s), default=0.0)

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def test_from_one_to_the_other_and_back_under_load(daemon: Daemon, folder: Path) -> None:
    clients = Load(daemon)
    pauses_s, waits_s = [], []
    try:
        for name in ("b", "a") * (SWAPS // 2):
            began_s = time.monotonic()
            state = load(daemon, folder / name)
            waits_s.append(clients.longest_wait_s(began_s))
            assert (state.phase, state.place, state.has_manifest) == (LoadPhase.SERVED, "beside", True)
            assert state.pause_s is not None
            pauses_s.append(state.pause_s)
    finally:
        clients.stop()
    assert clients.failures == []
    assert all(count >= SWAPS for count in clients.counts.values())
    assert max(pauses_s) < LONGEST_WAIT_S
    # The clients are threads of this process, on a machine that may do something else: the half of the swaps will do.
    waits_s.sort()
    print(
        f"{len(clients.waits)} streams; longest wait of a swap: half {waits_s[SWAPS // 2]:.3f} s, {waits_s[-1]:.3f} s"
    )
    assert waits_s[SWAPS // 2] < LONGEST_WAIT_S


def test_streams_end_on_the_model_that_they_began_with(daemon: Daemon, folder: Path) -> None:
    stream = Running(daemon, 1000)
    state = load(daemon, folder / "b", wait=False)
    assert (state.phase, state.is_switched) == (LoadPhase.DRAINING, True)
    assert ask(daemon) == expected_text(PROMPT, TOKENS, SEEDS["b"])
    assert "letting streams end on the old model, 1 left" in run(daemon, "status").stdout
    again = run(daemon, "model", "load", str(folder / "a"))
    assert again.returncode == 1
    assert again.stderr.startswith("seedancectl: cannot load a second model at once")
    assert stream.text() == expected_text(PROMPT, 1000, SEEDS["a"])
    wait_until(lambda: served(daemon).load.phase is LoadPhase.SERVED)  # type: ignore[union-attr]


@pytest.mark.parametrize("options", [("--policy", "continue"), ("--drain", "100ms")])
def test_streams_go_on_with_the_new_model(daemon: Daemon, folder: Path, options: tuple[str, ...]) -> None:
    stream = Running(daemon, 600)
    load(daemon, folder / "b", *options)
    assert 0 < cut_over(stream.text(), 600) < 600


def test_who_asks_for_the_model_sees_the_one_that_is_served(daemon: Daemon, folder: Path) -> None:
    load(daemon, folder / "b", "--name", "next")
    http = Http(daemon.address)
    status, body = http.get("/v1/models", daemon.keys["acme"])
    http.close()
    assert (status, [entry["id"] for entry in body["data"]]) == (200, ["next"])
    assert ask(daemon, model="next") == expected_text(PROMPT, TOKENS, SEEDS["b"])
    with pytest.raises(ApiRefused):
        ask(daemon)
    shown = run(daemon, "model", "show").stdout
    assert "next (synthetic), 8,192 tokens" in shown
    assert f"configured  {folder / 'a'}; the one above was loaded in its place" in shown
    listed = run(daemon, "model", "list").stdout
    assert [line.split()[0] for line in listed.splitlines()[1:]] == ["a", "*"]


def test_a_file_that_differs_by_a_bit_is_refused_before_anything_moves(
    daemon: Daemon, folder: Path, tmp_path: Path
) -> None:
    broken = synthetic_model(tmp_path / "broken", 9)
    write_manifest(broken)
    data = bytearray((broken / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (broken / "model.safetensors").write_bytes(data)
    clients = Load(daemon)
    try:
        done = run(daemon, "model", "load", str(broken))
        assert done.returncode == 1
        lines = done.stderr.splitlines()
        assert lines[-1].startswith(f"seedancectl: cannot use '{broken}/model.safetensors': it is not the file that")
        assert served(daemon).source == str(folder / "a")
    finally:
        clients.stop()
    assert clients.failures == []
    assert clients.counts["b"] == 0
    last = served(daemon).load
    assert last is not None
    assert (last.phase, last.is_switched) == (LoadPhase.FAILED, False)
    assert "loading" in run(daemon, "status").stdout


@pytest.mark.parametrize(
    ("spoil", "options", "reason"),
    [
        (lambda model: (model / "config.json").unlink(), (), "config.json': it is not there"),
        (lambda model: (model / "model.safetensors").write_bytes(b"x" * 100), (), "model.safetensors': it is no"),
        (lambda model: None, ("--manifest",), "SHA256SUMS': it is not there"),
        (
            lambda model: (model / "config.json").write_text('{"max_position_embeddings": 1}'),
            (),
            "cannot serve the new model",
        ),
    ],
)
def test_a_model_that_cannot_be_served_changes_nothing(
    daemon: Daemon,
    folder: Path,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    options: tuple[str, ...],
    reason: str,
) -> None:
    model = synthetic_model(tmp_path / "m", 9)
    spoil(model)
    stream = Running(daemon, 200)
    done = run(daemon, "model", "load", str(model), *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr.splitlines()[-1]
    assert stream.text() == expected_text(PROMPT, 200, SEEDS["a"])
    assert served(daemon).source == str(folder / "a")
    assert ask(daemon) == expected_text(PROMPT, TOKENS, SEEDS["a"])


def test_what_cannot_be_asked_for(daemon: Daemon) -> None:
    assert "no model is being loaded" in run(daemon, "model", "cancel").stderr
    assert run(daemon, "model", "load", "/x", "--policy", "y").returncode == 2
    assert run(daemon, "model", "load", "/x", "--drain", "y").returncode == 2


def test_what_is_served_stays_so_whoever_dies(folder: Path, tmp_path: Path) -> None:
    of_b = expected_text(PROMPT, TOKENS, SEEDS["b"])
    with running(tmp_path / "d", "acme", tables=tables(folder)) as daemon:
        load(daemon, folder / "b")
        daemon.kill(daemon.child("engine host").pid)
        wait_until(lambda: says(daemon) == of_b)
        daemon.stop()
        daemon.start()
        assert ask(daemon) == of_b
        assert json.loads(run(daemon, "model", "show", "--json").stdout)["source"] == str(folder / "b")
        load(daemon, folder / "a")
        daemon.stop()
        daemon.start()
        assert ask(daemon) == expected_text(PROMPT, TOKENS, SEEDS["a"])


def says(daemon: Daemon) -> str:
    with contextlib.suppress(ApiRefused):
        return ask(daemon)
    return ""


@pytest.mark.parametrize(("options", "moves"), [((), False), (("--policy", "continue"), True)])
def test_with_room_for_one_engine_requests_wait_for_the_other(
    folder: Path, tmp_path: Path, options: tuple[str, ...], moves: bool
) -> None:
    with running(tmp_path / "d", "acme", tables=tables(folder, load="instead")) as daemon:
        stream = Running(daemon, 800)
        texts: list[str] = []
        asked = threading.Event()

        def ask_meanwhile() -> None:
            wait_until(lambda: (state := served(daemon).load) is not None and state.phase is LoadPhase.DRAINING)
            asked.set()
            texts.append(ask(daemon))

        thread = threading.Thread(target=ask_meanwhile)
        if not moves:
            thread.start()
        state = load(daemon, folder / "b", *options)
        assert (state.phase, state.place) == (LoadPhase.SERVED, "instead")
        if moves:
            assert 0 < cut_over(stream.text(), 800) < 800
        else:
            thread.join(30)
            assert texts == [expected_text(PROMPT, TOKENS, SEEDS["b"])]
            assert stream.text() == expected_text(PROMPT, 800, SEEDS["a"])
        bad = synthetic_model(tmp_path / "bad", 9, max_position_embeddings=1)
        done = run(daemon, "model", "load", str(bad))
        assert (done.returncode, done.stdout) == (1, "")
        wait_until(lambda: says(daemon) == expected_text(PROMPT, TOKENS, SEEDS["b"]))
        daemon.stop()


def test_with_room_for_one_engine_it_goes_on_with_other_weights(folder: Path, tmp_path: Path) -> None:
    alike = synthetic_model(tmp_path / "alike", SEEDS["b"], max_position_embeddings=4096 * SEEDS["a"])
    with running(tmp_path / "d", "acme", "globex", tables=tables(folder, load="instead")) as daemon:
        stream = Running(daemon, 800)
        state = load(daemon, alike, "--policy", "continue")
        assert (state.phase, state.place, state.restart_reason) == (LoadPhase.SERVED, "reload", "")
        assert 0 < cut_over(stream.text(), 800) < 800
        clients = Load(daemon)
        try:
            for path in (folder / "a", alike) * 5:
                state = load(daemon, path)
                assert (state.place, state.is_switched) == ("reload", True)
        finally:
            clients.stop()
        assert clients.failures == []
        assert all(clients.counts.values())
        assert ask(daemon) == expected_text(PROMPT, TOKENS, SEEDS["b"])
        daemon.stop()


def test_a_manifest_is_written_and_a_model_is_checked_without_a_daemon(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m")

    def ctl_run(*arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            return ctl.run(["model", *arguments]), out.getvalue(), err.getvalue()

    status, _, err = ctl_run("check", str(model), "--manifest")
    assert (status, err.count("\n")) == (78, 1)
    assert err.startswith(f"seedancectl: cannot use '{model}/SHA256SUMS': it is not there")
    assert ctl_run("manifest", str(model)) == (0, f"{model}/SHA256SUMS: 3 files\n", "")
    status, out, err = ctl_run("check", str(model), "--manifest")
    assert (status, err) == (0, "")
    assert "3 files are as SHA256SUMS says" in out
    (model / "tokenizer.json").write_text("{}")
    assert ctl_run("check", str(model))[0] == 78
    status, _, err = ctl_run("manifest", "/nowhere")
    assert (status, err) == (
        78,
        "seedancectl: cannot use '/nowhere': there is no such directory; give that of a model\n",
    )
