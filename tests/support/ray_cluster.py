"""One small cluster of Ray's for a run of tests, whoever of its workers needs it: kept by a process of its own.

    python ray_cluster.py FOLDER

starts it, writes its address into the folder, and ends it when no process is left whose number is the name of a file in
the folder's `users`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from filelock import FileLock

ROOT = Path(__file__).parents[2]
STORE_BYTES, CPUS = 600 << 20, 5
_LOOK_S, _END_S = 0.1, 30.0


def keep_at_hand(environ: dict[str, str] | os._Environ[str]) -> None:
    """What has to be said before Ray is imported: it tells nobody of its use, writes nothing into the home, is quiet.

    Nobody else on the machine may use the cluster: the token is of this run of tests, by whichever worker.
    """
    run = environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    said = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": run}
    said |= {"RAY_worker_niceness": "0"}  # on a machine that does other things, too, 15 is long waits
    for name, value in said.items():
        environ.setdefault(name, value)


@contextmanager
def cluster(shared: Path) -> Iterator[str]:
    """The address of this run's cluster, which is started by whoever needs it first, and ends with the last.

    Args:
        shared: A folder of this run's.
    """
    folder = shared / "ray"
    with FileLock(shared / "ray.lock"):
        (folder / "users").mkdir(parents=True, exist_ok=True)
        mine = folder / "users" / str(os.getpid())
        mine.touch()
        if not (folder / "address").exists():
            _start(folder)
    try:
        yield (folder / "address").read_text()
    finally:
        with FileLock(shared / "ray.lock"):
            mine.unlink()
            if not any((folder / "users").iterdir()):
                _end(folder)


def _start(folder: Path) -> None:
    paths = [str(ROOT), *(str(each) for each in ROOT.glob("integrations/*/")), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    with (folder / "said").open("wb") as said:
        command = [sys.executable, __file__, str(folder)]
        # It must outlive the worker that starts it.
        keeper = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    while not (folder / "address").exists():
        assert keeper.poll() is None, (folder / "said").read_text()
        time.sleep(_LOOK_S)
    (folder / "keeper").write_text(str(keeper.pid))


def _end(folder: Path) -> None:
    """Wait for the end of the keeper and of all that it has started: no process of it may stay."""
    keeper = psutil.Process(int((folder / "keeper").read_text()))
    left, until = [keeper, *keeper.children(recursive=True)], time.monotonic() + _END_S
    while (left := [each for each in left if _runs(each)]) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    (folder / "address").unlink()
    said = [f"{each.pid} {each.cmdline()}" for each in left]
    for each in left:
        each.kill()
    assert not said, f"processes of Ray's have stayed: {said}"


def _runs(process: psutil.Process) -> bool:
    """Whether it has not ended: the worker that has started the keeper may not have heard of its end yet."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _keep(folder: Path) -> None:
    import ray

    # Paths of sockets have 107 characters at most, and pytest's folders are long already.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as temporary:
        told = ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=CPUS,
            object_store_memory=STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=temporary,
        )
        (folder / "new").write_text(told.address_info["address"])
        (folder / "new").rename(folder / "address")
        users = folder / "users"
        while any(psutil.pid_exists(int(user.name)) for user in users.iterdir()):
            time.sleep(_LOOK_S)
        ray.shutdown()


if __name__ == "__main__":
    keep_at_hand(os.environ)
    _keep(Path(sys.argv[1]))
