"""`--workers N`: one process collects all tests, then forks workers that take groups in turn, the longest first.

pytest-xdist would collect once for each worker, 13 CPU s each, and could not hand one preloaded process to all. A
worker that dies fails the test that it ran, and another takes its place. Linux only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest

PROCESSES = "waits_for_processes"
GOLDEN = "golden"
LONG_S = 1000
"""A test with a higher time limit starts with the long ones."""
END_S = 30
"""What a worker may take to end its fixtures after an interrupt."""


class Workers:
    """The plugin of pytest behind `--workers`. Made before any test module is imported."""

    def __init__(self, count: int) -> None:
        """Compiles all kernels, before the collection imports them."""
        from shardkeep.base.compiling.kernels import compile_kernels, kernel_modules
        from tests.support.forked import fork_context

        self._count = count
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the workers share the cores
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process that compiles starts others
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the same files
        sys.dont_write_bytecode = False
        fork_context()  # imports for all workers, beside the collection
        compile_kernels(kernel_modules(), lambda count: print(f"compiling {count} modules of kernels", flush=True))

    def pytest_collection(self, session: pytest.Session) -> None:
        """Modules and tests live until the end: the garbage collector would search them in vain, 2 CPU s."""
        gc.disable()
        config = session.config
        modules = sorted((config.rootpath / "tests").rglob("test_*.py"), reverse=True)
        if config.args_source is pytest.Config.ArgsSource.ARGS or _is_rewritten(modules[0]):
            return
        if not (pid := os.fork()):
            _import_in_turn(config, modules)
        config.add_cleanup(lambda: os.waitpid(pid, 0))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        arrange(items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs the collected tests. At the end prints the CPU seconds of each folder."""
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        gc.enable()
        gc.collect()
        gc.freeze()
        tests = Run(session, self._count)
        tests.until_end()
        _print_costs(session.config, tests.cpu_s)
        return True


def _is_rewritten(path: Path) -> bool:
    """Whether this pytest has imported a test module before."""
    tag = f"{sys.implementation.cache_tag}-pytest-{pytest.__version__}"
    return (path.parent / "__pycache__" / f"{path.stem}.{tag}.pyc").exists()


def _import_in_turn(config: pytest.Config, modules: Sequence[Path]) -> NoReturn:
    """Imports the test modules from the last to the first, until the parent has come there from the first on.

    pytest rewrites the asserts of each module and keeps the result in a file, 20 CPU s in a fresh clone. An import that
    fails is left to the collection, which reports it."""
    for path in modules:
        if _is_rewritten(path):
            break
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(config.rootpath).with_suffix("").parts))
    os._exit(0)


def arrange(items: list[pytest.Item]) -> None:
    """Orders the tests: the longest groups first, the tests of a group together."""
    limits: Counter[str] = Counter()
    turns: dict[str, int] = {}
    for item in items:
        group = group_of(item)
        limits[group] += limit_s(item)
        turns[group] = min(turns.get(group, 3), _turn(item))
    items.sort(key=lambda item: _place(group_of(item), turns, limits))


def _place(group: str, turns: dict[str, int], limits: Counter[str]) -> tuple[int, int, str]:
    return turns[group], -limits[group] if turns[group] == 0 else 0, group


def limit_s(item: pytest.Item) -> int:
    limit = item.get_closest_marker("timeout")
    return int(limit.args[0]) if limit else int(item.config.getini("timeout"))


def group_of(item: pytest.Item) -> str:
    """The tests of one file share a group, because they share fixtures. All tests that read the golden job share one.

    Any worker takes a long test of a job of processes, unless a marker names its group. Groups with a marker:
    pages of the documents, network namespaces.
    """
    named = item.get_closest_marker("group")
    if named:
        return str(named.args[0])
    fixtures = getattr(item, "fixturenames", ())
    if is_long(item) and {"cluster", GOLDEN} & set(fixtures):
        return item.nodeid
    return GOLDEN if GOLDEN in fixtures else item.nodeid.split("::")[0]


def is_long(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("chaos") or item.get_closest_marker("slow"))


def _turn(item: pytest.Item) -> int:
    """The longest groups start first: long tests by the limits of their group, processes, whole jobs in one process."""
    if is_long(item) or limit_s(item) > LONG_S:
        return 0
    if item.get_closest_marker(PROCESSES):
        return 1
    return 2 if "tests/integration/" in item.nodeid else 3


# ---- the process that collected ----


@dataclass
class Worker:
    """A forked process, as its parent sees it."""

    pid: int
    pidfd: int
    messages: Connection
    tests: list[int] = field(default_factory=list)
    """Of its group, those that have not begun."""
    current: int | None = None
    error: str = ""
    """An exception outside of a test."""


class Run:
    """The tests of a session, in workers."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self._session, self._items = session, session.items
        self._groups = _groups(self._items)
        self._workers: dict[Connection, Worker] = {}
        self.cpu_s: Counter[str] = Counter({"collection": cpu_s()})
        for _ in range(min(count, len(self._groups))):
            self._start([])

    def until_end(self) -> None:
        """Raises what ends a session early."""
        try:
            while self._workers:
                ready = wait([end for worker in self._workers.values() for end in (worker.messages, worker.pidfd)])
                for worker in list(self._workers.values()):
                    if worker.messages in ready or worker.pidfd in ready:
                        self._read(worker)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
                if self._session.shouldstop:
                    raise self._session.Interrupted(self._session.shouldstop)
        finally:
            self._end()

    def _start(self, tests: Sequence[int]) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            for other in (ours, *self._workers):
                other.close()
            _work(self._session, theirs)
        theirs.close()
        self._workers[ours] = Worker(pid, os.pidfd_open(pid), ours, list(tests))

    def _read(self, worker: Worker) -> None:
        """Handles a message, or the death of a worker, whose end of the pipe a process that it left may hold open."""
        kind, given = "died", ()
        with contextlib.suppress(EOFError, OSError):
            if worker.messages.poll():
                kind, *given = worker.messages.recv()
        getattr(self, f"_{kind}")(worker, *given)

    def _next(self, worker: Worker) -> None:
        """A worker asks for a test."""
        if not worker.tests and self._groups:
            worker.tests = self._groups.pop(0)
        worker.current = worker.tests.pop(0) if worker.tests else None
        same_group = bool(worker.tests)
        with contextlib.suppress(BrokenPipeError):
            worker.messages.send(None if worker.current is None else (worker.current, same_group))

    def _begins(self, _worker: Worker, nodeid: str, location: Any) -> None:
        self._session.config.hook.pytest_runtest_logstart(nodeid=nodeid, location=location)

    def _reports(self, _worker: Worker, data: dict[str, Any], cpu_s: float) -> None:
        self.cpu_s[folder_of(data["nodeid"])] += cpu_s
        hook = self._session.config.hook
        report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
        hook.pytest_runtest_logreport(report=report)

    def _ends(self, _worker: Worker, nodeid: str, location: Any) -> None:
        self._session.config.hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def _leaves(self, worker: Worker, error: str) -> None:
        """A worker has ended its fixtures."""
        self._forget(worker)
        if error:
            self._fail(self._items[-1].nodeid, f"at the end of a worker:\n{error}", when="teardown")

    def _fails(self, worker: Worker, error: str) -> None:
        worker.error = error

    def _died(self, worker: Worker) -> None:
        code = self._forget(worker)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if worker.current is None:
            raise self._session.Failed(f"a worker ended {how} outside of a test\n{worker.error}")
        nodeid = self._items[worker.current].nodeid
        self._fail(nodeid, f"the worker that ran this test ended {how}\n{worker.error}", when="call")
        if worker.tests or self._groups:
            self._start(worker.tests)

    def _forget(self, worker: Worker) -> int:
        """Waits for the end of a worker; its exit code."""
        del self._workers[worker.messages]
        worker.messages.close()
        os.close(worker.pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])

    def _fail(self, nodeid: str, words: str, *, when: str) -> None:
        place = (nodeid.split("::")[0], 0, nodeid)
        report: Any = pytest.TestReport(nodeid, place, {}, "failed", words, when)  # type: ignore[arg-type]
        self._session.config.hook.pytest_runtest_logreport(report=report)

    def _end(self) -> None:
        """Ends workers that still run, after an interrupt."""
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGINT)
        for worker in list(self._workers.values()):
            if not wait([worker.pidfd], END_S):
                os.kill(worker.pid, signal.SIGKILL)
            self._forget(worker)


def cpu_s() -> float:
    """Of this process, and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def folder_of(nodeid: str) -> str:
    parts = nodeid.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else "top"


def _print_costs(config: pytest.Config, costs: Counter[str]) -> None:
    """What the preloaded process started is one sum, without what is still running or lost its parent."""
    from tests.support.forked import end_preloaded

    end_preloaded()
    costs["forked commands"] = cpu_s() - costs.total()
    reporter: Any = config.pluginmanager.getplugin("terminalreporter")
    figures = ", ".join(f"{folder} {seconds:.0f}" for folder, seconds in costs.most_common() if seconds >= 0.5)
    reporter.write_line(f"\nCPU s: {cpu_s():.0f} = {figures}")


def _groups(items: Sequence[pytest.Item]) -> list[list[int]]:
    """The numbers of the tests of each group."""
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(group_of(item), []).append(number)
    return list(groups.values())


# ---- a worker ----


class Messages:
    """A plugin that sends to the parent what the reporter of a terminal would show."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self._config, self._parent, self._cpu_s = config, parent, cpu_s()

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._parent.send(("begins", nodeid, location))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        before, self._cpu_s = self._cpu_s, cpu_s()
        self._parent.send(("reports", data, self._cpu_s - before))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self._parent.send(("ends", nodeid, location))


class Outside(pytest.Item):
    """Stands for the next test where it is of another group: only the fixtures of the session stay."""

    def runtest(self) -> NoReturn:
        raise NotImplementedError


def _work(session: pytest.Session, parent: Connection) -> NoReturn:
    code = 1
    try:
        _become_worker(session, parent)
        outside = Outside.from_parent(session, name="outside")
        for number, same_group in _asked(parent):
            item = session.items[number]
            following = session.items[number + 1] if same_group else outside
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        parent.send(("leaves", _end_of(session)))
        code = 0
    except KeyboardInterrupt:
        _end_of(session)
    except BaseException:
        with contextlib.suppress(OSError):
            parent.send(("fails", traceback.format_exc()))
    finally:
        os._exit(code)


def _become_worker(session: pytest.Session, parent: Connection) -> None:
    from tests.support.forked import adopt_preloaded

    config, plugins = session.config, session.config.pluginmanager
    capture: Any = plugins.getplugin("capturemanager")
    if capture.is_globally_capturing():
        capture.stop_global_capturing()  # the file is the parent's
        capture.start_global_capturing()
    plugins.unregister(name="terminalreporter")
    unseen = Path(os.devnull).open("w")  # noqa: SIM115 # until the process ends
    reporter = pytest.TerminalReporter(config, unseen)
    reporter.pytest_sessionstart(session)
    plugins.register(reporter, "terminalreporter")
    plugins.register(Messages(config, parent))
    adopt_preloaded()


def _asked(parent: Connection) -> Iterator[tuple[int, bool]]:
    """The numbers of tests, one by one, and whether the next is of the same group."""
    while True:
        parent.send(("next",))
        given = parent.recv()
        if given is None:
            return
        yield given


def _end_of(session: pytest.Session) -> str:
    """Ends the fixtures of the session; the error, if one is raised."""
    try:
        runner: Any = session.config.pluginmanager.getplugin("runner")
        runner.pytest_sessionfinish(session)
    except BaseException:
        return traceback.format_exc()
    return ""
