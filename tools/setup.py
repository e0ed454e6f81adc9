"""Set up `.venv`: reuse the torch that is here, install the rest around it.

Run through `make setup [PYTHON=...] [TORCH=cpu|cuda|present]`; every other target runs it with `--if-needed`.
Standard library only, since it runs before anything is installed.

A torch that the chosen interpreter can import is reused and never replaced: the venv then sees that interpreter's
packages, and everything else is installed under constraints that pin them. Only where torch is missing is one
installed, first and alone. A finished set-up leaves a stamp keyed on this file and pyproject.toml; one that was
interrupted leaves a stamp that says so, and is redone from the start.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = (3, 11)
TORCH = "torch==2.13.0"
TRITON_FOR_TORCH = {"2.11": "triton==3.6.0", "2.13": "triton==3.7.1", "2.14": "triton==3.8.0"}
TRITON_RANGE = "triton>=3.6,<3.9"
EXTRAS = "notebook,cluster,test"
STAMP = "m3cp-setup.json"
ASKED = ("auto", "cpu", "cuda", "present")

PROBE = r"""
import json, os, sys
found = {"version": list(sys.version_info[:2]), "executable": sys.executable, "torch": None, "torch_build": None,
         "torch_error": None, "torch_dir": None, "triton": None, "triton_error": None,
         "prefix": sys.prefix}
try:
    import torch
    found["torch"] = torch.__version__
    found["torch_dir"] = os.path.dirname(os.path.dirname(torch.__file__))
    found["torch_build"] = "rocm" if torch.version.hip else "cuda" if torch.version.cuda else "cpu"
except ModuleNotFoundError as error:
    if error.name != "torch":
        found["torch_error"] = repr(error)
except Exception as error:
    found["torch_error"] = repr(error)
try:
    import triton
    found["triton"] = triton.__version__
except ModuleNotFoundError as error:
    if error.name != "triton":
        found["triton_error"] = repr(error)
except Exception as error:
    found["triton_error"] = repr(error)
dirs = [d for d in sys.path if os.path.basename(d) in ("site-packages", "dist-packages")]
if found["torch_dir"] and found["torch_dir"] not in dirs:
    dirs.append(found["torch_dir"])
found["site_dirs"] = dirs
found["distributions"] = {}
try:
    from importlib.metadata import distributions
    for d in distributions():
        if d.metadata["Name"]:
            found["distributions"].setdefault(d.metadata["Name"], d.version)
except ImportError:  # a Python too old to be used; its version says so
    pass
print("\n" + json.dumps(found))
"""


class Stop(Exception):
    """Set-up can't go on; the message names the fix."""


@dataclass(frozen=True)
class Found:
    """What one interpreter can import. `torch_error` is set when torch is there but doesn't import."""

    version: tuple
    executable: str
    prefix: str = ""
    torch: str | None = None
    torch_build: str | None = None  # "rocm", "cuda" or "cpu"
    torch_error: str | None = None
    torch_dir: str | None = None
    triton: str | None = None
    triton_error: str | None = None
    site_dirs: list = field(default_factory=list)
    distributions: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """What decides which torch build is right, without torch: the driver's device files and the platform."""

    amd: bool
    nvidia: bool
    linux: bool


@dataclass(frozen=True)
class Plan:
    """What set-up will do. `expect` is the torch build that must come out of the installation, if it matters."""

    reuse: bool
    torch: str | None
    triton: str | None
    expect: str | None
    notes: tuple = ()


def host(dev: Path = Path("/dev"), system: str | None = None) -> Host:
    """The GPUs that have a driver here, by device file."""
    nvidia = any(re.fullmatch(r"nvidia\d+", p.name) for p in dev.glob("nvidia*"))
    return Host(amd=(dev / "kfd").exists(), nvidia=nvidia, linux=(system or platform.system()) == "Linux")


def decide(asked: str, found: Found, here: Host) -> Plan:
    """What to install, given what was asked for (TORCH=...), what the interpreter has and what the host is.

    Raises Stop, with the fix, on an AMD host without a ROCm torch, on a torch that doesn't import, and where
    `present` was asked for and there is none.
    """
    if asked not in ASKED:
        raise Stop(f"TORCH={asked} is not one of cpu, cuda, present")
    if tuple(found.version) < OLDEST_PYTHON:
        had = ".".join(map(str, found.version))
        hint = next(filter(_runs, ("python3.12", "python3.13", "python3.11", "python3.14")), "<a Python 3.11 or newer>")
        raise Stop(f"{found.executable} is Python {had}; 3.11 or newer is needed: `make setup PYTHON={hint}`")
    if here.amd and asked != "cpu" and found.torch_build != "rocm":
        had = f"torch {found.torch} ({found.torch_build} build)" if found.torch else "no torch"
        raise Stop(
            f"this host has an AMD GPU (/dev/kfd), and {found.executable} has {had}, not a ROCm build.\n"
            "torch and triton for ROCm come from the vendor's image: start the vendor's PyTorch image, clone the\n"
            "project inside it and run `make setup PYTHON=<the image's python3>`, which makes a venv with system\n"
            "site packages on top of it. To work on this host's CPU alone: `make setup TORCH=cpu`."
        )
    if found.torch_error and asked in ("auto", "present"):
        raise Stop(
            f"{found.executable} has a torch that fails to import: {found.torch_error}\n"
            "Repair it, choose another interpreter (`make setup PYTHON=...`), or give the project a torch of its own\n"
            "with `make setup TORCH=cpu` or `make setup TORCH=cuda`."
        )
    if asked == "present" and not found.torch:
        raise Stop(
            f"TORCH=present was asked for, and {found.executable} has no torch. Name the interpreter that has it:\n"
            "`make setup TORCH=present PYTHON=...`"
        )
    if found.torch and asked in ("auto", "present"):
        return _reuse(found, here)
    triton = TRITON_FOR_TORCH["2.13"] if here.linux else None
    if asked == "cpu":
        return Plan(False, TORCH + "+cpu" if here.linux else TORCH, triton, "cpu")
    expect = "cuda" if asked == "cuda" or here.nvidia else None
    return Plan(False, TORCH, triton, expect)


def _runs(python: str) -> bool:
    """Whether the command works; version managers leave names on the path that don't."""
    return bool(shutil.which(python)) and subprocess.run([python, "-V"], capture_output=True).returncode == 0


def _reuse(found: Found, here: Host) -> Plan:
    series = ".".join(found.torch.split(".")[:2])
    notes = []
    numbers = re.match(r"(\d+)\.(\d+)", found.torch)
    if not numbers or not (2, 11) <= tuple(map(int, numbers.groups())) <= (2, 14):
        notes.append(f"torch {found.torch} is outside 2.11 to 2.14, which are the versions this project is tested with")
    if found.triton:
        return Plan(True, None, None, None, tuple(notes))
    if found.torch_build == "rocm":
        why = found.triton_error or "there is none"
        raise Stop(
            f"{found.executable} has a ROCm torch ({found.torch}) but its triton does not import: {why}\n"
            "PyPI's triton would overwrite the vendor's module, so it is not installed. Install the triton that belongs\n"
            "to this torch from the vendor's image or wheels, then run `make setup` again."
        )
    if found.triton_error:
        raise Stop(
            f"{found.executable} has a triton that fails to import: {found.triton_error}\nRepair it, or give the project"
            " packages of its own with `make setup TORCH=cpu` or `make setup TORCH=cuda`."
        )
    return Plan(True, None, TRITON_FOR_TORCH.get(series, TRITON_RANGE) if here.linux else None, None, tuple(notes))


def constraints(plan: Plan, base: Found, venv: Found) -> list:
    """Lines that pin what must not change: all of a reused interpreter's packages, and the venv's torch and triton."""
    pins = dict(base.distributions) if plan.reuse else {}
    ours = {name.lower().replace("_", "-"): version for name, version in venv.distributions.items()}
    pins.update({name: ours[name] for name in ("torch", "triton") if name in ours})
    skip = {"pip", "setuptools", "wheel", "m3cp"}
    valid = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==\d[A-Za-z0-9.+!_-]*")
    lines = (f"{n}=={v}" for n, v in sorted(pins.items(), key=lambda i: i[0].lower()) if n.lower() not in skip)
    return [line for line in lines if valid.fullmatch(line)]


def parent_pth(base: Found, venv: Found) -> str | None:
    """The text of the .pth file that lets the venv see the packages which `--system-site-packages` doesn't show it.

    A venv made from a venv links to the interpreter below both, so the packages of the one between would be lost.
    None when nothing is missing.
    """
    missing = [d for d in base.site_dirs if d not in venv.site_dirs]
    if not missing:
        return None
    return "".join(f"import site; site.addsitedir({d!r})\n" for d in missing)


def link_jupyter(base_prefix: Path, venv: Path) -> int:
    """Link the data and settings of a reused Jupyter, which it looks for under the venv only. Returns how many.

    Kernels are left out: the venv has its own.
    """
    count = 0
    for tree in ("share/jupyter", "etc/jupyter"):
        for path in (base_prefix / tree).rglob("*"):
            link = venv / path.relative_to(base_prefix)
            if path.is_file() and not link.exists() and "kernels" not in path.relative_to(base_prefix).parts:
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)
                count += 1
    return count


def key(root: Path = ROOT) -> str:
    """What a finished set-up was made from: pyproject.toml and this script."""
    digest = hashlib.sha256()
    for path in (root / "pyproject.toml", root / "tools" / "setup.py"):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def read_stamp(venv: Path) -> dict:
    """The stamp in the venv; {} where there is none or it can't be read."""
    try:
        stamp = json.loads((venv / STAMP).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def write_stamp(venv: Path, stamp: dict) -> None:
    """Write the stamp in one step, so that it is never half there."""
    new = venv / (STAMP + ".new")
    new.write_text(json.dumps(stamp, indent=1) + "\n")
    new.replace(venv / STAMP)


def stands(stamp: dict, venv: Path, *, root: Path, asked: str, executable: str | None) -> bool:
    """Whether the set-up that the stamp describes is finished, current, and what is asked for now.

    `asked` "auto" accepts whatever stands; `executable` is None unless PYTHON was named.
    """
    if stamp.get("state") != "done" or stamp.get("key") != key(root) or stamp.get("root") != str(root):
        return False
    return _same_wish(stamp, asked, executable) and venv_python(venv).exists()


def _same_wish(stamp: dict, asked: str, executable: str | None) -> bool:
    if asked == "present" and not stamp.get("reuse"):
        return False
    if asked in ("cpu", "cuda") and (stamp.get("reuse") or stamp.get("build") != asked):
        return False
    return executable is None or stamp.get("executable") == executable


def wishes(stamp: dict, asked: str, executable: str | None) -> tuple:
    """(TORCH, interpreter) for a set-up: what is asked for now, else what an earlier one was asked for."""
    if asked == "auto":
        asked = stamp.get("asked", "auto")
    earlier = stamp.get("executable")
    if executable is None and earlier and Path(earlier).exists():
        executable = earlier
    return asked, executable or sys.executable


def venv_python(venv: Path) -> Path:
    """The venv's interpreter."""
    return venv / "bin" / "python"


def fate(venv: Path, stamp: dict, *, root: Path, base: Found, plan: Plan) -> str:
    """What becomes of what is at `.venv`: "make" it, "update" it in place, or "remake" it from nothing.

    Raises Stop for a `.venv` that this script didn't make and can't take over.
    """
    if not venv.exists() or not any(venv.iterdir()):
        return "make"
    config = venv / "pyvenv.cfg"
    if stamp:
        same = (stamp.get("root"), stamp.get("executable"), stamp.get("reuse")) == (
            str(root),
            base.executable,
            plan.reuse,
        )
        whole = stamp.get("state") == "done" and config.exists() and venv_python(venv).exists()
        return "update" if same and whole and (plan.reuse or stamp.get("torch") == plan.torch) else "remake"
    if config.exists() and venv_python(venv).exists():
        text = config.read_text()
        version = re.search(r"^version(?:_info)?\s*=\s*(\d+)\.(\d+)", text, re.M)
        shares = "include-system-site-packages = true" in text
        if version and tuple(map(int, version.groups())) == tuple(base.version) and shares == plan.reuse:
            return "update"
    raise Stop(f"{venv} was not made by `make setup` and does not fit; move it away, then run `make setup` again")


def probe(python: str) -> Found:
    """What that interpreter has. Imports its torch and triton, which takes seconds."""
    done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True)
    if done.returncode:
        raise Stop(f"{python} could not be asked for its packages:\n{done.stderr.strip()[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    found["version"] = tuple(found["version"])
    return Found(**found)


def say(text: str) -> None:
    """One line of progress, at once."""
    print(text, flush=True)


def call(command: list, what: str) -> None:
    """Run a command, saying every 30 s that it still runs. Raises Stop with its last lines."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while True:
        try:
            output, _ = process.communicate(timeout=30)
            break
        except subprocess.TimeoutExpired:
            say(f"    ... {time.monotonic() - started:.0f} s")
    if process.returncode:
        raise Stop(f"{what} failed:\n{output.strip()[-3000:]}")


def pip(venv: Path, *args: str) -> None:
    """pip inside the venv, quiet but for errors."""
    command = [str(venv_python(venv)), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *args]
    call(command, "pip install " + " ".join(args))


def make_venv(venv: Path, base: Found, plan: Plan, stamp: dict) -> None:
    """A new venv, stamped as started before anything else is in it."""
    if venv.exists():
        old = venv.with_name(venv.name + ".old")
        shutil.rmtree(old, ignore_errors=True)
        venv.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    venv.mkdir()
    write_stamp(venv, stamp)
    command = [base.executable, "-m", "venv", *(["--system-site-packages"] if plan.reuse else []), str(venv)]
    try:
        call(command, "python3 -m venv")
    except Stop as error:
        raise Stop(
            f"{error}\nInstall your system's venv package for this Python (python3-venv on Debian and Ubuntu), or name"
            " another interpreter: `make setup PYTHON=...`"
        ) from None


def set_up(root: Path, asked: str, executable: str) -> None:
    """Make or mend `.venv` under `root`. Raises Stop."""
    venv = root / ".venv"
    say(f"set-up: looking at {executable}")
    base = probe(executable)
    plan = decide(asked, base, host())
    for note in plan.notes:
        say(f"  note: {note}")
    stamp = {
        "state": "started",
        "key": key(root),
        "root": str(root),
        "asked": asked,
        "executable": base.executable,
        "reuse": plan.reuse,
        "torch": plan.torch,
    }
    step = fate(venv, read_stamp(venv), root=root, base=base, plan=plan)
    if step == "update":
        say("[1/4] .venv: kept, brought up to date")
        write_stamp(venv, stamp)
    else:
        if step == "remake":
            say("  what is at .venv is unfinished or was made for something else: starting over")
        say("[1/4] .venv: making it, a few seconds")
        make_venv(venv, base, plan, stamp)
    inside = probe(str(venv_python(venv)))
    if plan.reuse:
        text = parent_pth(base, inside)
        if text:
            major, minor = base.version
            (venv / "lib" / f"python{major}.{minor}" / "site-packages" / "_m3cp_parent.pth").write_text(text)
            inside = probe(str(venv_python(venv)))
        say(f"[2/4] torch {base.torch} ({base.torch_build}): reused from {base.executable}")
    inside = install_runtime(venv, plan, inside, asked)
    if plan.reuse and inside.torch != base.torch:
        raise Stop(f"the venv sees torch {inside.torch}, not the {base.torch} of {base.executable}")
    (venv / "constraints.txt").write_text("\n".join(constraints(plan, base, inside)) + "\n")
    say("[4/4] m3cp with its notebook and test packages: about a minute, 500 MB")
    pip(venv, "-c", str(venv / "constraints.txt"), "-e", f"{root}[{EXTRAS}]")
    if plan.reuse:
        link_jupyter(Path(base.prefix), venv)
        # A reused ipykernel has its kernel spec beside the reused interpreter; notebooks must start the venv's.
        call([str(venv_python(venv)), "-m", "ipykernel", "install", "--sys-prefix", "--name", "python3"], "ipykernel")
    after = probe(str(venv_python(venv)))
    if not after.torch or after.torch != inside.torch:
        raise Stop(f"installing the rest changed torch from {inside.torch} to {after.torch or after.torch_error}")
    write_stamp(venv, {**stamp, "state": "done", "build": after.torch_build})
    say(f"set-up done: .venv with torch {after.torch}, triton {after.triton or 'absent'}")


def install_runtime(venv: Path, plan: Plan, inside: Found, asked: str) -> Found:
    """Steps 2 and 3: torch first and alone, then triton, where the venv lacks them. Returns what it then has."""
    if plan.torch and not inside.torch:
        say(f"[2/4] {plan.torch}: a CPU build is about 200 MB and a minute, a CUDA build several GB")
        try:
            pip(venv, plan.torch)
        except Stop as error:
            if asked != "cpu":
                raise
            raise Stop(
                f"{error}\nTORCH=cpu wants PyTorch's CPU build, which PyTorch publishes on its own wheel index: set"
                " PIP_EXTRA_INDEX_URL to it. `make setup` without TORCH takes the build that pip finds."
            ) from None
        inside = probe(str(venv_python(venv)))
    elif plan.torch:
        say(f"[2/4] torch {inside.torch}: kept")
    if plan.torch and not inside.torch:
        raise Stop(f"torch was installed and does not import: {inside.torch_error}")
    if plan.expect and inside.torch_build != plan.expect:
        raise Stop(
            f"torch {inside.torch} is a {inside.torch_build} build where a {plan.expect} build is needed. Point pip at"
            " PyTorch's wheels for it (PIP_INDEX_URL), or choose with `make setup TORCH=cpu|cuda|present`."
        )
    if plan.triton and not inside.triton:
        say(f"[3/4] {plan.triton}: about 200 MB, half a minute")
        pip(venv, "-c", _torch_pin(venv, inside), plan.triton)
        inside = probe(str(venv_python(venv)))
    else:
        had = f"{inside.triton}: {'reused' if plan.reuse else 'kept'}" if inside.triton else ""
        say(f"[3/4] triton {had or 'has no build for this system; the CPU backend needs none'}")
    return inside


def _torch_pin(venv: Path, inside: Found) -> str:
    path = venv / "constraints.txt"
    path.write_text(f"torch=={inside.torch}\n")
    return str(path)


@contextlib.contextmanager
def one_at_a_time():
    """Two targets started together set up once: the second waits."""
    import fcntl

    with open(__file__) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say("set-up: another one is running here; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(argv: list | None = None) -> int:
    """Exit status 0 when the set-up stands, 1 when it stopped."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torch", default="auto", help="auto, cpu, cuda or present")
    parser.add_argument("--this-python", action="store_true", help="redo a set-up made with another interpreter")
    parser.add_argument("--if-needed", action="store_true", help="say nothing when the set-up stands")
    args = parser.parse_args(argv)
    asked = args.torch or "auto"
    venv = ROOT / ".venv"
    try:
        with one_at_a_time():
            wanted = sys.executable if args.this_python else None
            stamp = read_stamp(venv)
            if stands(stamp, venv, root=ROOT, asked=asked, executable=wanted):
                if not args.if_needed:
                    say("set-up: .venv stands and is up to date")
                return 0
            set_up(ROOT, *wishes(stamp, asked, wanted))
    except Stop as error:
        print(f"set-up stopped: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up interrupted; the next run starts it over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
