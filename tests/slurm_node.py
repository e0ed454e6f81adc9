"""A real Slurm of one node on this machine, for tests: Debian's slurm-wlm and munge, run as root, ended by their pids."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import drivers

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "sinfo")
START_S = 30.0


def missing() -> str:
    """Why there can be no Slurm here, in words; empty when there can."""
    absent = [p for p in PROGRAMS if shutil.which(p, path=os.environ["PATH"] + ":/usr/sbin") is None]
    if absent:
        return f"needs Debian's slurm-wlm and munge: no {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "needs root, to run munged and slurmd"


class Slurm:
    """Starts munged, slurmctld and slurmd with their state in `folder`; `environment` makes clients find them."""

    def __init__(self, folder: Path):
        self._processes: list[subprocess.Popen] = []
        host = socket.gethostname().split(".")[0]
        for name in ("spool", "state", "log"):
            (folder / name).mkdir(parents=True)
        ports = [_free_port(), _free_port()]
        config = folder / "slurm.conf"
        config.write_text(f"""ClusterName=m3cp
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
KillWait=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
""")
        self.environment = {"SLURM_CONF": str(config), "PATH": os.environ["PATH"] + ":/usr/sbin"}
        self._start_munge(folder)
        for program in ("slurmctld", "slurmd"):
            self._start([program, "-D", "-f", str(config)], folder / "log" / f"{program}.out")
        deadline = time.monotonic() + START_S
        while "idle" not in self.ask("sinfo", "-h", "-o", "%t"):
            if time.monotonic() > deadline:
                self.close()
                logs = "\n".join(p.read_text(errors="replace")[-1500:] for p in sorted((folder / "log").iterdir()))
                raise RuntimeError(f"Slurm's node was not idle within {START_S:.0f} s:\n{logs}")
            time.sleep(0.3)

    def _start_munge(self, folder: Path) -> None:
        home = folder / "munge"
        home.mkdir(mode=0o700)
        key = home / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        words = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
                 f"--pid-file={home}/pid", f"--log-file={home}/log", f"--seed-file={home}/seed"]  # fmt: skip
        self._start(words, folder / "log" / "munged.out")
        deadline = time.monotonic() + START_S
        while not (folder / "munge.socket").exists() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _start(self, command: list[str], log: Path, **options) -> None:
        env = {**os.environ, **self.environment}
        with open(log, "wb") as file:
            self._processes.append(subprocess.Popen(command, stdout=file, stderr=file, env=env, **options))

    def ask(self, *command: str) -> str:
        """What a client of it prints."""
        return subprocess.run(command, env={**os.environ, **self.environment}, capture_output=True, text=True).stdout

    def left(self) -> list[int]:
        """The living processes that carry this Slurm's settings: daemons, steps, jobs and clients."""
        words, found = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if words in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return [pid for pid in found if drivers.alive(pid)]

    def close(self) -> None:
        """End the daemons, the last one first, then whatever their jobs have left: steps outlive the daemon that started them."""
        for process in reversed(self._processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        while left := self.left():  # again: one may have started another meanwhile
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            drivers.wait_until_gone(left, 5.0)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
