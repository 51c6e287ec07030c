"""The `kvroute` command, as a person at a terminal or a process supervisor sees it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import httpx
import pytest
from click.testing import CliRunner
from redis import Redis

from app.cli import main
from app.config_file import unknown_variables
from app.core.keys import Keyspace
from app.core.settings.router import RouterSettings
from app.core.settings.worker import WorkerSettings
from app.local.cluster import Cluster
from app.local.redis_server import EmbeddedRedis
from app.options import Command
from app.up import _listening, _until_stopped
from tests.e2e.conftest import listens
from tests.redis_servers import default_kind, require_binary, require_redis

UP = ["up", "--workers=1", "--replicas=1", "--speedup=20"]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in [*os.environ]:
        if name.startswith("KVROUTE_") or name == "REDIS_URL":
            monkeypatch.delenv(name)


def kvroute(*arguments, inherits=(), without=""):
    """Runs a command that ends by itself. inherits: file descriptors that it gets.

    without: a module that it does not find.
    """
    run = f"import sys; sys.modules[{without!r}] = None; from app.cli import main; main()"
    return subprocess.run(
        [sys.executable, *(["-c", run] if without else ["-m", "app.cli"]), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        pass_fds=inherits,
    )


def kvroute_here(*arguments):
    """Runs a command in this process, a second faster. It must end before it serves anything."""
    with pytest.MonkeyPatch.context() as patched:
        # The signals that it takes over are those of the tests.
        patched.setattr("app.cli._end_when_told", lambda: None)
        return CliRunner().invoke(main, arguments)


def test_the_help_lists_all_commands():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert re.findall(r"^  (\w+)  ", result.output, re.MULTILINE) == [
        "agent",
        "demo",
        "doctor",
        "drain",
        "explain",
        "inspect",
        "picker",
        "planner",
        "replay",
        "reset",
        "router",
        "up",
        "usage",
        "whatif",
        "worker",
    ]


def test_a_plain_install_has_help_and_says_what_to_install_for_other_commands():
    listed = kvroute("--help", without="stamina")
    assert listed.returncode == 0, listed.stderr
    assert re.findall(r"^  (router|replay|demo)  ", listed.stdout, re.MULTILINE) == ["router"]
    for command, package, extra in (
        ("demo", "stamina", "loadtest"),
        ("up", "stamina", "worker"),
        ("worker --engine=torch --port=0", "torch", "torch"),
    ):
        refused = kvroute(*command.split(), without=package)
        assert refused.returncode == 1
        how = f"is missing: pip install '.[{extra}]' in a clone of kvroute, or 'WHEEL[{extra}]'"
        assert refused.stderr == f"Error: {package} {how} of its wheel\n"


def commands(group, *path):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield " ".join([*path, name]), command


def test_every_command_shows_our_own_errors_as_one_line():
    assert [name for name, found in commands(main) if not isinstance(found, Command)] == []


def test_every_option_is_explained():
    shown = [(name, o) for name, found in commands(main) for o in found.params]
    options = [(name, o) for name, o in shown if isinstance(o, click.Option)]
    assert [(name, o.name) for name, o in options if not o.help] == []


NUMBERS = (click.types.IntParamType, click.types.FloatParamType)


@pytest.mark.parametrize(
    "command",
    [
        *("router", "worker", "up", "demo", "replay", "whatif"),
        *("inspect usage", "inspect verify"),
    ],
)
def test_no_option_accepts_a_number_that_is_not_finite_or_out_of_bounds(command):
    options = dict(commands(main))[command].params
    numbers = [option for option in options if isinstance(option.type, NUMBERS)]
    assert numbers
    texts = ("nan", "inf", "-inf", "1e300", "-1", "9" * 21)
    assert [(o.name, text) for o in numbers for text in texts if takes(o, text)] == []


def takes(option, text):
    try:
        option.type.convert(text, option, None)
    except click.BadParameter:
        return False
    return True


@contextmanager
def taken_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "command",
    [["router"], ["worker"], [*UP, "--no-haproxy"], [*UP, "--haproxy"]],
    ids=["router", "worker", "up, shared socket", "up, haproxy"],
)
def test_a_port_in_use_is_reported_in_one_line(command):
    if "--haproxy" in command:
        require_binary("haproxy")
    with taken_port() as port:
        ended = kvroute_here(*command, f"--port={port}")
    assert ended.exit_code == 1
    assert ended.stderr == f"Error: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (
            ["worker", "--port=0", "--profile=abacus"],
            "Error: --profile: needs one of 70b-4xh100, 70b-4xh200, 8b-1xh100, got 'abacus'",
        ),
        (
            ["worker", "--port=0", "--worker-id=a/b"],
            "Error: --worker-id 'a/b': 1-253 letters, digits and . _ - are allowed",
        ),
        (
            ["worker", "--port=0", "--redis-url=nonsense"],
            "Error: REDIS_URL 'nonsense': must begin with one of redis://, rediss://, unix://, "
            "redis+sentinel://, rediss+sentinel://, redis+cluster://, rediss+cluster://",
        ),
        (
            ["router", "--port=0", "--shared-fd=999"],
            "Error: --shared-fd 999: Bad file descriptor",
        ),
        (
            ["worker", "--port=0", "--kv-pool-tokens=15"],
            "Error: --kv-pool-tokens: needs at least one block of 16, got 15",
        ),
        (
            ["worker", "--port=0", "--role=prefill"],
            "Error: --role prefill: needs --kv-transfer, as KV has to travel for it",
        ),
        (
            ["worker", "--port=0", "--host-pool-tokens=15"],
            "Error: --host-pool-tokens: needs at least one block of 16, got 15",
        ),
        (
            ["worker", "--port=0", "--engine=torch", "--disk-pool-tokens=15"],
            "Error: --disk-pool-tokens: needs at least one block of 16, got 15",
        ),
        (
            ["router", "--port=0", "--log-level=warning", "--namespace=a{b"],
            "Error: namespace 'a{b': 1-128 letters, digits and . _ / - are allowed",
        ),
    ],
)
def test_a_bad_setting_is_reported_in_one_line(command, error):
    ended = kvroute_here(*command)
    assert ended.exit_code == 1
    assert ended.stderr == f"{error}\n"
    assert ended.stdout == ""


def test_a_process_with_a_bad_setting_prints_nothing_else():
    ended = kvroute("router", "--port=0", "--log-level=warning", "--redis-url=nonsense")
    assert ended.returncode == 1
    assert ended.stderr == (
        "Error: REDIS_URL 'nonsense': must begin with one of redis://, rediss://, unix://, "
        "redis+sentinel://, rediss+sentinel://, redis+cluster://, rediss+cluster://\n"
    )
    assert ended.stdout == ""


@pytest.mark.parametrize("command", ["router", "worker"])
def test_a_bad_namespace_is_refused_before_a_port_is_taken(command):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = kvroute_here(command, f"--port={taken.getsockname()[1]}", "--namespace=a{b")
    assert ended.exit_code == 1
    assert "Error: namespace 'a{b': 1-128 letters" in ended.stderr


def test_a_shared_socket_that_does_not_listen_is_reported_in_one_line():
    with socket.socket() as idle:
        number = idle.fileno()
        ended = kvroute("router", "--port=0", f"--shared-fd={number}", inherits=(number,))
    assert ended.returncode == 1
    assert ended.stderr == f"Error: --shared-fd {number}: the socket is not listening\n"


def test_a_worker_that_does_not_fit_its_namespace_waits_and_says_why():
    require_redis(default_kind())
    with ExitStack() as opened:
        redis = opened.enter_context(EmbeddedRedis())

        def worker(name, block_size):
            run = [sys.executable, "-m", "app.cli", "worker", "--port=0", "--log-level=warning"]
            options = [f"--worker-id={name}", f"--block-size={block_size}"]
            started = opened.enter_context(
                subprocess.Popen(
                    [*run, f"--redis-url={redis.url}", *options], stderr=subprocess.PIPE, text=True
                )
            )
            opened.callback(started.kill)
            return started

        client = opened.enter_context(Redis.from_url(redis.url))
        first = worker("w0", 16)
        while not client.exists(Keyspace("default")["meta"]):
            assert first.poll() is None
        second = worker("w1", 32)
        assert second.stderr is not None
        assert (
            "w1:0 is not routed to: attempt 1 failed, retrying: "
            "worker w1:0 has block_size 32, but namespace default has 16\n"
        ) in second.stderr.readline()
        assert second.poll() is None


@pytest.mark.parametrize("command", [[*UP, "--port=0"], ["inspect", "summary"]])
def test_a_redis_that_cannot_be_reached_is_named_in_one_line(command):
    ended = CliRunner().invoke(main, [*command, "--redis-url=redis://:sesame@127.0.0.1:1"])
    assert ended.exit_code == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith("Error: REDIS_URL 'redis://127.0.0.1:1': ConnectionError: ")


def test_up_refuses_an_empty_redis_url():
    ended = CliRunner().invoke(main, [*UP, "--port=0", "--redis="])
    assert ended.exit_code == 1
    assert ended.stderr.startswith("Error: REDIS_URL '': must begin with one of redis://, ")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--prefill-workers=1"], "need --kv-transfer"),
        (
            ["--prefill-workers=1", "--decode-workers=2", "--workers=2", "--kv-transfer=kvroute"],
            "1 --prefill-workers and 2 --decode-workers are more than 2 workers",
        ),
        (["--decode-workers=1", "--kv-transfer=kvroute", "--planner"], "with a planner"),
    ],
)
def test_up_refuses_roles_that_cannot_be(options, why):
    ended = CliRunner().invoke(main, [*UP, "--port=0", *options])
    assert ended.exit_code == 1
    assert why in ended.stderr


def cluster_elsewhere(router, worker):
    return Cluster(
        num_workers=1,
        num_replicas=1,
        redis_url="redis://user:sesame@elsewhere:6379/2",
        router=router,
        worker=worker,
    )


def test_up_names_what_its_engine_and_its_routers_have():
    usual = _listening(cluster_elsewhere(RouterSettings(namespace="blue"), WorkerSettings()))
    assert "kvroute doctor --redis-url redis://elsewhere:6379/2 --namespace blue\n" in usual
    assert "/v1/chat/completions" in usual
    assert "/console/" in usual
    # A size gets random weights, but no tokenizer: such a model takes no text.
    torch = WorkerSettings(engine="torch", model="tiny")
    other = _listening(cluster_elsewhere(RouterSettings(console=False), torch))
    assert "/v1/chat/completions" not in other
    assert """/v1/completions -d '{"model": "tiny", "prompt": [1, 2, 3]}'""" in other
    assert "/console/" not in other


def test_up_does_not_print_the_redis_password():
    cluster = cluster_elsewhere(RouterSettings(), WorkerSettings())
    assert "redis      redis://elsewhere:6379/2\n" in _listening(cluster)
    assert "sesame" not in _listening(cluster)


def descendants(pid):
    """Processes that `pid` started, those that they started, and so on."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name is in parentheses and may contain anything.
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = set()
    waiting = [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found.update(children)
        waiting += children
    return found


@dataclass(slots=True)
class Up:
    """A cluster by `kvroute up`. children: ids of its processes."""

    process: subprocess.Popen[str]
    urls: dict[str, str]
    children: set[int]

    def ended(self):
        # Does not return while any child holds the pipes open.
        rest, errors = self.process.communicate()
        assert (self.process.returncode, rest) == (0, "stopped\n")
        while any(Path(f"/proc/{pid}").exists() for pid in self.children):
            time.sleep(0.01)  # an orphan that was killed is still to be reaped
        assert [name for name, url in self.urls.items() if listens(url)] == []
        # haproxy prints messages of its own when it stops.
        return [line for line in errors.splitlines() if not re.match(r"\[\w+\] +\(\d+\) :", line)]


@contextmanager
def up(folder, *flags):
    require_redis(default_kind())
    if not Path("/proc/self/stat").exists():
        pytest.skip("finds processes in /proc")
    # Somebody else's package, which must not be taken for ours.
    (folder / "app").mkdir()
    (folder / "app" / "__init__.py").touch()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "app.cli", *UP, *flags, "--port=0"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "Press Ctrl-C to stop.\n":
                break
        text = "".join(lines)
        assert lines[0].startswith("balancer "), text
        urls = dict(re.findall(r"^(balancer|router r0|worker w0|redis) +(\S+)", text, re.MULTILINE))
        assert {"balancer", "router r0", "redis"} <= urls.keys(), text
        assert [name for name, url in urls.items() if not listens(url)] == []
        yield Up(process, urls, descendants(process.pid))
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("number", "balancer"),
    [
        pytest.param(signal.SIGINT, "--no-haproxy", marks=pytest.mark.slow),
        (signal.SIGTERM, "--haproxy"),
    ],
)
def test_up_prints_its_addresses_and_a_signal_ends_all_its_processes(number, balancer, tmp_path):
    if balancer == "--haproxy":
        require_binary("haproxy")
    with up(tmp_path, balancer) as started:
        assert len(started.children) == (4 if balancer == "--haproxy" else 3)
        started.process.send_signal(number)
        assert started.ended() == []


def test_a_second_signal_ends_all_processes_of_up_at_once(tmp_path):
    with up(tmp_path, "--no-haproxy", "--drain-s=3600", "--model-name=m") as started:
        url = started.urls["router r0"]
        asks = {"model": "m", "prompt": "a", "max_tokens": 30_000, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asks | {"stream": True}) as answer:
            assert answer.status_code == 200
            started.process.send_signal(signal.SIGTERM)
            while listens(url):
                time.sleep(0.01)
            started.process.send_signal(signal.SIGTERM)
            started.ended()


def test_up_reports_once_that_its_redis_has_ended(monkeypatch, capsys):
    require_redis(default_kind())
    cluster = Cluster(
        num_workers=1, num_replicas=1, router=RouterSettings(), worker=WorkerSettings()
    )
    assert cluster.redis is not None
    with cluster.redis as redis:
        assert redis.pid is not None
        assert cluster.ended() == {}
        os.kill(redis.pid, signal.SIGKILL)
        os.waitid(os.P_PID, redis.pid, os.WEXITED | os.WNOWAIT)
        two_naps = iter((None, None))
        monkeypatch.setattr("app.up.time.sleep", lambda _: next(two_naps))
        with pytest.raises(StopIteration):
            _until_stopped(cluster)
    assert capsys.readouterr().err == "redis exited with status -9\n"


@pytest.mark.parametrize("more", [[], ["--metrics-key=k"]])
def test_no_cluster_is_open_to_the_network_unless_that_is_meant(more):
    ended = kvroute_here(*UP, "--port=0", "--balancer-host=0.0.0.0", *more)
    assert ended.exit_code == 1
    assert "without a key, only loopback addresses are served" in ended.output


def test_a_shared_socket_that_anybody_can_reach_needs_a_key(one_redis_server):
    with socket.create_server(("0.0.0.0", 0)) as shared:
        number = shared.fileno()
        url = f"--redis-url={one_redis_server.url}"
        ended = kvroute("router", "--port=0", url, f"--shared-fd={number}", inherits=(number,))
    assert ended.returncode == 1
    assert "only loopback addresses are served, and host is '0.0.0.0'" in ended.stderr


def runs(pid):
    """Whether a process has not ended. An orphan that has may stay, if nobody waits for it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and not stat.read_text().rpartition(")")[2].startswith(" Z")


@pytest.mark.parametrize("flag", ["--migrate", "--planner", "--haproxy", "--kv-lease-s=9"])
def test_what_a_gateway_does_or_cannot_know_is_refused_beside_one(flag):
    pytest.importorskip("h2")
    result = CliRunner().invoke(main, ["up", "--gateway=envoy", flag])
    assert result.exit_code == 1
    assert f"{flag.partition('=')[0]}: not together with --gateway envoy" in result.output


def test_a_gateway_that_is_not_installed_is_named(monkeypatch):
    pytest.importorskip("h2")
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(main, ["up", "--gateway=envoy"])
    assert (result.exit_code, "envoy is not installed" in result.output) == (1, True)


@pytest.mark.parametrize("more", [[], ["--planner", "--wait-queue=0"]])
def test_a_cluster_without_workers_needs_who_starts_one_and_where_to_wait(more):
    result = CliRunner().invoke(main, ["up", "--workers=0", *more])
    assert result.exit_code == 1
    assert "workers: 0 needs --planner" in result.output


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_killing_up_ends_all_its_processes():
    require_redis(default_kind())
    require_binary("haproxy")
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", *UP, "--haproxy", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        while process.stdout.readline() != "Press Ctrl-C to stop.\n":
            assert process.poll() is None
        children = descendants(process.pid)
        assert len(children) == 4
        process.kill()
        deadline = time.monotonic() + 20
        while any(map(runs, children)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        left = [pid for pid in children if runs(pid)]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_up_whose_terminal_is_closed_while_it_starts_leaves_no_processes():
    require_redis(default_kind())
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", *UP, "--no-haproxy", "--port=0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests under nohup has it ignored, and so would this.
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        children = set()
        # redis-server and the worker, neither of which is ready yet.
        while len(children) < 2:
            assert process.poll() is None
            children = descendants(process.pid)
        process.send_signal(signal.SIGHUP)
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, output) == (0, "stopped\n")
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.parametrize("command", ["router", "worker", "up"])
def test_a_redis_that_would_evict_keys_is_refused_with_the_reason(command, own_redis_server):
    with Redis.from_url(own_redis_server.url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
    option = "--redis" if command == "up" else "--redis-url"
    arguments = (command, option, own_redis_server.url, "--port=0")
    if command == "router":  # in a process, with which its socket ends
        process = kvroute(*arguments)
        status, said = process.returncode, process.stderr
    else:
        ended = kvroute_here(*arguments)
        status, said = ended.exit_code, ended.stderr
    assert status == 1
    assert "Redis has maxmemory-policy allkeys-lru" in said
    assert "noeviction" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("command", ["router", "worker"])
def test_a_service_that_is_stopped_while_it_starts_ends_with_status_0(command):
    with socket.create_server(("127.0.0.1", 0)) as silent_redis:
        silent_redis.settimeout(30)
        port = silent_redis.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", command, "--port=0"],
            env={**os.environ, "REDIS_URL": f"redis://127.0.0.1:{port}"},
        )
        try:
            with silent_redis.accept()[0]:
                process.terminate()
                assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("command", ["router", "worker"])
def test_a_service_logs_where_it_listens_and_why_it_starts_without_redis(command, own_redis_server):
    with Redis.from_url(own_redis_server.url) as client:
        client.config_set("requirepass", "sesame")
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", command, "--port=0"],
        env={**os.environ, "REDIS_URL": own_redis_server.url},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = [process.stderr.readline(), process.stderr.readline()]
        why, listening = sorted(lines, key=lambda line: "listening on" in line)
        url = listening.strip().rpartition(f"{command} listening on ")[2]
        assert listens(url), lines
    finally:
        process.kill()
        process.communicate()
    assert why.endswith(
        f"starting without Redis at {own_redis_server.url}: "
        "AuthenticationError: Authentication required.\n"
    )


def test_a_cluster_that_cannot_start_says_why_and_what_variables_are_no_settings_once(monkeypatch):
    require_redis(default_kind())
    monkeypatch.setenv("KVROUTE_WAIT_QUEU", "9")
    monkeypatch.setenv("KVROUTE_SERVICE_PORT_HTTP", "8080")  # as Kubernetes does
    monkeypatch.setenv("KVROUTE_ROUTER_PORT_8080_TCP_ADDR", "10.0.0.1")
    monkeypatch.setenv("KVROUTE_WORKER_KEY", "k")
    ended = kvroute(*UP, "--port=0", "--no-haproxy", "--profile=abacus")
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert [line for line in lines if "WARNING" not in line] == [
        "Error: --profile: needs one of 70b-4xh100, 70b-4xh200, 8b-1xh100, got 'abacus'",
        "Error: worker w0 exited with status 1",
    ]
    assert [line.partition("kvroute: ")[2] for line in lines if "WARNING" in line] == [
        "the environment has KVROUTE_WAIT_QUEU, which is no setting; "
        "did you mean KVROUTE_WAIT_QUEUE?"
    ]


def test_every_variable_that_a_file_here_names_is_known():
    root = Path(__file__).parents[1]
    files = [root / "Dockerfile", *root.glob("deploy/*.*"), *root.glob("docs/**/*.md")]
    named = {n for f in files for n in re.findall(r"\bKVROUTE_[A-Z_]+\b", f.read_text())}
    assert named
    assert list(unknown_variables(dict.fromkeys(named, ""))) == []


@pytest.mark.parametrize(
    ("command", "loading"),
    [
        ("doctor", "app.core.keys"),  # no command has been looked at yet
        ("router", "uvicorn.config"),
        *(
            pytest.param(name, "uvicorn.config", marks=pytest.mark.slow)
            for name in ("worker", "agent", "planner")
        ),
    ],
)
def test_ctrl_c_while_a_command_loads_ends_it_without_a_traceback(command, loading):
    process = subprocess.Popen(
        # It prints each module as soon as that is imported.
        [sys.executable, "-X", "importtime", "-m", "app", *command.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert process.stderr is not None
        assert any(line.endswith(f" {loading}\n") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        printed = [line for line in process.stderr if not line.startswith("import time:")]
        process.wait(20)
    finally:
        process.kill()
        process.communicate()
    assert printed == []
    assert process.returncode in (0, -signal.SIGINT)
