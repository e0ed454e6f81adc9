"""Set-up's decisions on made-up interpreters and hosts, and the files that a stranger starts from."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("m3cp_setup", ROOT / "tools" / "setup.py")
setup = importlib.util.module_from_spec(_spec)
sys.modules["m3cp_setup"] = setup
_spec.loader.exec_module(setup)

LAPTOP = setup.Host(amd=False, nvidia=False, linux=True)
MAC = setup.Host(amd=False, nvidia=False, linux=False)
NVIDIA = setup.Host(amd=False, nvidia=True, linux=True)
AMD = setup.Host(amd=True, nvidia=False, linux=True)
BARE = setup.Found(version=(3, 12), executable="/x/python3")
CUDA = replace(BARE, torch="2.11.0+cu130", torch_build="cuda", triton="3.6.0", distributions={"numpy": "2.5.2"})
ROCM = replace(BARE, torch="2.13.0+rocm7.1", torch_build="rocm", triton="3.7.1")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    "asked, found, here, torch, triton, expect",
    [
        ("auto", BARE, LAPTOP, "torch==2.13.0", "triton==3.7.1", None),
        ("auto", BARE, MAC, "torch==2.13.0", None, None),
        ("auto", BARE, NVIDIA, "torch==2.13.0", "triton==3.7.1", "cuda"),
        ("cuda", BARE, LAPTOP, "torch==2.13.0", "triton==3.7.1", "cuda"),
        ("cpu", BARE, NVIDIA, "torch==2.13.0+cpu", "triton==3.7.1", "cpu"),
        ("cpu", BARE, MAC, "torch==2.13.0", None, "cpu"),
        ("cpu", CUDA, NVIDIA, "torch==2.13.0+cpu", "triton==3.7.1", "cpu"),
        ("cpu", BARE, AMD, "torch==2.13.0+cpu", "triton==3.7.1", "cpu"),
    ],
)
def test_torch_is_installed_where_it_is_missing_or_refused(asked, found, here, torch, triton, expect):
    assert setup.decide(asked, found, here) == setup.Plan(False, torch, triton, expect)


@pytest.mark.parametrize("asked", ["auto", "present"])
@pytest.mark.parametrize("found, here", [(CUDA, NVIDIA), (CUDA, LAPTOP), (ROCM, AMD)])
def test_a_torch_that_is_here_is_reused(asked, found, here):
    plan = setup.decide(asked, found, here)
    assert plan.reuse and plan.torch is None and plan.triton is None


@pytest.mark.parametrize(
    "torch, triton", [("2.11.0", "triton==3.6.0"), ("2.14.1", "triton==3.8.0"), ("2.12.1", "triton>=3.6,<3.9")]
)
def test_a_reused_torch_gets_the_triton_it_pairs_with(torch, triton):
    plan = setup.decide("auto", replace(CUDA, torch=torch, triton=None), LAPTOP)
    assert plan.reuse and plan.torch is None and plan.triton == triton


@pytest.mark.parametrize(
    "asked, found, here, says",
    [
        ("auto", BARE, AMD, "system\nsite packages"),
        ("auto", CUDA, AMD, "cuda build"),
        ("cuda", BARE, AMD, "vendor's image"),
        ("present", replace(CUDA, torch_build="cpu"), AMD, "not a ROCm build"),
        ("auto", replace(ROCM, triton=None), AMD, "PyPI's triton would overwrite"),
        ("auto", replace(ROCM, triton=None, triton_error="ImportError()"), AMD, "ImportError"),
        ("present", BARE, LAPTOP, "TORCH=present"),
        ("auto", replace(BARE, torch_error="OSError('libcuda')"), NVIDIA, "libcuda"),
        ("auto", replace(BARE, version=(3, 10)), LAPTOP, "make setup PYTHON="),
        ("gpu", BARE, LAPTOP, "cpu, cuda, present"),
    ],
)
def test_setup_stops_and_names_the_fix(asked, found, here, says):
    with pytest.raises(setup.Stop, match=re.escape(says)):
        setup.decide(asked, found, here)


def test_a_torch_outside_the_tested_range_is_used_and_mentioned():
    assert "2.10.0" in setup.decide("auto", replace(CUDA, torch="2.10.0"), NVIDIA).notes[0]
    assert setup.decide("auto", CUDA, NVIDIA).notes == ()


def test_hosts_are_told_apart_by_their_device_files(tmp_path):
    assert setup.host(tmp_path, "Linux") == LAPTOP
    (tmp_path / "nvidiactl").touch()
    assert setup.host(tmp_path, "Linux") == LAPTOP  # the driver is there, no GPU is
    (tmp_path / "nvidia0").touch()
    assert setup.host(tmp_path, "Linux") == NVIDIA
    (tmp_path / "nvidia0").unlink()
    (tmp_path / "kfd").touch()
    assert setup.host(tmp_path, "Linux") == AMD


def test_constraints_pin_what_is_present():
    base = replace(CUDA, distributions={"numpy": "2.5.2", "pip": "25", "m3cp": "1", "torch": "2.11.0", "odd": "dev"})
    plan = setup.decide("auto", base, NVIDIA)
    venv = replace(base, distributions={"torch": "2.11.0", "triton": "3.6.0"})
    assert setup.constraints(plan, base, venv) == ["numpy==2.5.2", "torch==2.11.0", "triton==3.6.0"]
    fresh = setup.decide("auto", BARE, LAPTOP)
    venv = replace(BARE, distributions={"torch": "2.13.0+cpu", "triton": "3.7.1", "sympy": "1.14"})
    assert setup.constraints(fresh, base, venv) == ["torch==2.13.0+cpu", "triton==3.7.1"]


def _bare_venv(python, path, *flags):
    subprocess.run([python, "-m", "venv", "--without-pip", *flags, str(path)], check=True)
    return str(path / "bin" / "python")


def test_a_venv_on_a_venv_sees_its_torch(tmp_path):
    parent = _bare_venv(sys.executable, tmp_path / "parent")
    site = next((tmp_path / "parent").glob("lib/python*/site-packages"))
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text(
        "__version__ = '2.11.0'\nclass version:\n    hip = '7.0'\n    cuda = None\n"
    )
    child = _bare_venv(parent, tmp_path / "child", "--system-site-packages")
    base, before = setup.probe(parent), setup.probe(child)
    assert (base.torch, base.torch_build, base.torch_dir) == ("2.11.0", "rocm", str(site))
    assert before.torch_dir != str(site)

    own = next((tmp_path / "child").glob("lib/python*/site-packages"))
    (own / "_m3cp_parent.pth").write_text(setup.parent_pth(base, before))
    after = setup.probe(child)
    assert (after.torch, after.torch_dir) == ("2.11.0", str(site))
    assert setup.parent_pth(base, after) is None


def test_a_torch_that_breaks_on_import_is_not_taken_for_absent(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import a_library_that_is_missing")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = setup.probe(sys.executable)
    assert found.torch is None and "a_library_that_is_missing" in found.torch_error


@pytest.fixture
def tree(tmp_path):
    """A root with the files that the stamp's key reads."""
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "tools/setup.py"):
        (tmp_path / name).write_text("one")
    return tmp_path


def _finish(tree, **changes):
    venv = tree / ".venv"
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    (venv / "bin" / "python").touch()
    (venv / "pyvenv.cfg").write_text("include-system-site-packages = false\nversion = 3.12.1\n")
    stamp = {
        "state": "done",
        "key": setup.key(tree),
        "root": str(tree),
        "asked": "auto",
        "executable": "/x/python3",
        "reuse": False,
        "torch": "torch==2.13.0",
        "build": "cpu",
        **changes,
    }
    setup.write_stamp(venv, stamp)
    return venv, stamp


def test_a_finished_setup_stands_until_its_inputs_change(tree):
    venv, stamp = _finish(tree)

    def stands(asked="auto", executable=None):
        return setup.stands(setup.read_stamp(venv), venv, root=tree, asked=asked, executable=executable)

    assert stands() and stands("cpu") and stands(executable="/x/python3")
    assert not stands("cuda") and not stands("present") and not stands(executable="/y/python3")
    (tree / "pyproject.toml").write_text("two")
    assert not stands()


@pytest.mark.parametrize("changes", [{"state": "started"}, {"root": "/elsewhere"}, {"key": "old"}])
def test_a_setup_that_is_unfinished_moved_or_old_does_not_stand(tree, changes):
    venv, stamp = _finish(tree, **changes)
    assert not setup.stands(stamp, venv, root=tree, asked="auto", executable=None)


def test_what_becomes_of_a_venv(tree):
    plan = setup.decide("auto", BARE, LAPTOP)
    venv = tree / ".venv"

    def fate(**changes):
        stamp = _finish(tree, **changes)[1] if changes.get("state") != "none" else _finish(tree)[1] and {}
        return setup.fate(venv, stamp, root=tree, base=BARE, plan=plan)

    assert setup.fate(venv, {}, root=tree, base=BARE, plan=plan) == "make"
    assert fate(key="old") == "update"
    assert fate(state="started") == "remake"
    assert fate(root="/elsewhere") == "remake"
    assert fate(executable="/y/python3") == "remake"
    assert fate(reuse=True) == "remake"
    assert fate(state="none") == "update"  # made by hand, and fits
    with pytest.raises(setup.Stop, match="not made by"):
        setup.fate(venv, {}, root=tree, base=replace(BARE, version=(3, 11)), plan=plan)


def test_a_later_target_keeps_what_was_asked_for_earlier(tree):
    stamp = {"asked": "cpu", "executable": sys.executable}
    assert setup.wishes(stamp, "auto", None) == ("cpu", sys.executable)
    assert setup.wishes(stamp, "cuda", "/y/python3") == ("cuda", "/y/python3")
    assert setup.wishes({**stamp, "executable": "/gone/python3"}, "auto", None) == ("cpu", sys.executable)


class Fakes:
    """Stands in for pip, venv and the interpreters; records what pip was asked for."""

    def __init__(self, monkeypatch, base, here):
        self.pips, self.base, self.inside = [], base, replace(BARE, executable="/venv/python")
        monkeypatch.setattr(setup, "probe", lambda python: self.inside if ".venv" in python else self.base)
        monkeypatch.setattr(setup, "host", lambda: here)
        monkeypatch.setattr(setup, "call", lambda command, what: None)
        monkeypatch.setattr(setup, "pip", self.pip)

    def pip(self, venv, *args):
        self.pips.append(args)
        for package, build in (("torch", "cpu"), ("triton", None)):
            wanted = [a for a in args if a.startswith(package + "==")]
            if wanted:
                version = wanted[0].split("==")[1]
                dists = {**self.inside.distributions, package: version}
                self.inside = replace(self.inside, **{package: version}, distributions=dists)
                if build:
                    self.inside = replace(self.inside, torch_build=build)


def test_torch_comes_first_and_alone(tree, monkeypatch):
    fakes = Fakes(monkeypatch, BARE, LAPTOP)
    setup.set_up(tree, "auto", "/x/python3")
    assert fakes.pips[0] == ("torch==2.13.0",)
    assert fakes.pips[1][-1] == "triton==3.7.1"
    assert fakes.pips[2][-1] == f"{tree}[notebook,cluster,test]"
    assert len(fakes.pips) == 3
    assert setup.read_stamp(tree / ".venv")["state"] == "done"


def test_a_reused_torch_is_pinned_and_never_installed(tree, monkeypatch):
    base = replace(CUDA, distributions={"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.5.2"})
    fakes = Fakes(monkeypatch, base, NVIDIA)
    fakes.inside = replace(base, executable="/venv/python")
    setup.set_up(tree, "auto", "/x/python3")
    assert len(fakes.pips) == 1 and "-c" in fakes.pips[0] and "runtime" not in fakes.pips[0][-1]
    pins = (tree / ".venv" / "constraints.txt").read_text().split()
    assert pins == ["numpy==2.5.2", "torch==2.11.0+cu130", "triton==3.6.0"]


def test_a_cpu_build_does_not_pass_on_a_gpu_node(tree, monkeypatch):
    Fakes(monkeypatch, BARE, NVIDIA)
    with pytest.raises(setup.Stop, match="cpu build where a cuda build is needed"):
        setup.set_up(tree, "auto", "/x/python3")
    assert setup.read_stamp(tree / ".venv")["state"] == "started"


def test_an_interrupted_setup_is_redone(tree, monkeypatch):
    fakes = Fakes(monkeypatch, BARE, LAPTOP)
    works = setup.pip

    def interrupted(venv, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(setup, "pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setup.set_up(tree, "auto", "/x/python3")
    venv = tree / ".venv"
    (venv / "half-written").touch()
    assert not setup.stands(setup.read_stamp(venv), venv, root=tree, asked="auto", executable=None)
    monkeypatch.setattr(setup, "pip", works)
    setup.set_up(tree, "auto", "/x/python3")
    assert not (venv / "half-written").exists() and len(fakes.pips) == 3
    assert not (tree / ".venv.old").exists()


def test_a_reused_jupyter_finds_its_data(tmp_path):
    for name in ("share/jupyter/lab/index.html", "share/jupyter/kernels/python3/kernel.json", "etc/jupyter/a.json"):
        (tmp_path / "base" / name).parent.mkdir(parents=True)
        (tmp_path / "base" / name).write_text(name)
    assert setup.link_jupyter(tmp_path / "base", tmp_path / "venv") == 2
    assert (tmp_path / "venv" / "share/jupyter/lab/index.html").read_text()
    assert not (tmp_path / "venv" / "share/jupyter/kernels").exists()
    assert setup.link_jupyter(tmp_path / "base", tmp_path / "venv") == 0


# The one list of dependencies


def _all_requirements():
    extras = PROJECT["optional-dependencies"]
    return {"": PROJECT["dependencies"], **extras}


def test_every_dependency_is_listed_once_and_torch_only_as_runtime():
    names = [(Requirement(line).name, extra) for extra, lines in _all_requirements().items() for line in lines]
    assert len({name for name, _ in names}) == len(names)
    assert {name for name, extra in names if extra == "runtime"} == {"torch", "triton"}


@pytest.mark.parametrize(
    "package, version",
    [("torch", v) for v in ("2.11.0", "2.13.0", "2.14.1")]
    + [("triton", v) for v in ("3.6.0", "3.7.1", "3.8.0")]
    + [("numpy", v) for v in ("2.4.6", "2.5.2")],
)
def test_supported_versions_are_allowed(package, version):
    lines = [line for lines in _all_requirements().values() for line in lines if Requirement(line).name == package]
    assert lines and Requirement(lines[0]).specifier.contains(version)


def test_what_setup_installs_is_what_the_project_allows():
    allowed = {Requirement(line).name: Requirement(line).specifier for line in _all_requirements()["runtime"]}
    for line in (setup.TORCH, *setup.TRITON_FOR_TORCH.values()):
        pinned = Requirement(line)
        assert allowed[pinned.name].contains(str(pinned.specifier).removeprefix("=="))
    assert Requirement(setup.TRITON_RANGE).specifier == allowed["triton"]
    assert set(setup.EXTRAS.split(",")) <= set(PROJECT["optional-dependencies"])
    oldest = ".".join(map(str, setup.OLDEST_PYTHON))
    assert PROJECT["requires-python"] == f">={oldest}"


def test_conda_brings_python_and_pip_and_pip_the_rest():
    import rattler

    lines = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    conda = {rattler.MatchSpec(line).name.normalized: line for line in lines if isinstance(line, str)}
    assert set(conda) == {"python", "pip"}
    allowed = SpecifierSet(conda["python"].removeprefix("python"))
    assert allowed.contains("3.11") and allowed.contains("3.12") and not allowed.contains("3.10")
    (pip,) = [line["pip"] for line in lines if isinstance(line, dict)]
    for line in pip:
        project = re.fullmatch(r"-e \.\[([a-z,]+)\]", line)
        if project:
            assert set(project[1].split(",")) == set(PROJECT["optional-dependencies"])
        else:
            Requirement(line)
    assert any(line.startswith("-e .[") for line in pip)


# Makefile and the scripts in .ci


def make_targets():
    """Targets that `make` prints, in order."""
    text = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"^  make ([a-z0-9-]+) ", text, re.M)


def test_make_alone_prints_the_story_in_order():
    targets = make_targets()
    assert [t for t in targets if t in ("setup", "doctor", "test", "sweep", "figures", "lab", "clean")] == [
        "setup",
        "doctor",
        "test",
        "sweep",
        "figures",
        "lab",
        "clean",
    ]
    rules = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert targets == [rule for rule in rules if rule not in ("help", "ready")]
    phony = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.M)[1].split()
    assert set(phony) == set(rules)


@pytest.fixture
def made(tmp_path):
    """A tree with the real Makefile over a set-up and an interpreter that only say that they were called."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "setup.py").write_text("import sys; open('log', 'a').write('setup\\n')")
    (tmp_path / "tests" / "interpret").mkdir(parents=True)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "${TRITON_INTERPRET:-0} $*" >>log\n[ ! -e fails ]\n')
    python.chmod(0o755)

    def run(target):
        env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "TRITON_INTERPRET")}
        done = subprocess.run(["make", target, f"PYTHON={sys.executable}"], cwd=tmp_path, env=env, capture_output=True)
        return done.returncode, (tmp_path / "log").read_text().splitlines()

    return tmp_path, run


@pytest.mark.parametrize("fails", [False, True])
def test_make_test_runs_both_suites_even_when_the_first_fails(made, fails):
    root, run = made
    if fails:
        (root / "fails").touch()
    status, log = run("test")
    assert (status != 0) == fails
    assert log == [
        "setup",
        "0 -m pytest -n 2 --dist worksteal tests --ignore=tests/interpret",
        "1 -m pytest -n 2 --dist worksteal tests/interpret",
    ]


@pytest.mark.parametrize("target", ["doctor", "test", "sweep", "figures", "lab"])
def test_targets_set_up_what_is_missing_first(made, target):
    _, run = made
    status, log = run(target)
    assert status == 0 and log[0] == "setup" and len(log) > 1


@pytest.fixture
def gpu_node(tmp_path):
    """`.ci/run-gpu` over made-up GPU tests, with a python3 whose torch counts two GPUs."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run-gpu", tmp_path / ".ci")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  multigpu\n  slow\n")
    (tmp_path / "tests").mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then echo 2; else exec {sys.executable} "$@"; fi\n')
    python.chmod(0o755)

    def run(body, *args, **given):
        text = f"import pytest\n\n@pytest.mark.gpu\ndef test_one(): pass\n\n@pytest.mark.multigpu\ndef test_two(): {body}\n"
        (tmp_path / "tests" / "test_gpu.py").write_text(text)
        env = {**os.environ, "PYTHON": str(python), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **given}  # plugins cost seconds
        env.pop("PYTEST_ADDOPTS", None)
        return subprocess.run(
            ["bash", ".ci/run-gpu", *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.mark.parametrize(
    "body, args, status",
    [
        ("pass", (), 0),
        ("pass", ("3",), 2),  # fewer GPUs than promised
        ("pytest.skip('needs 4 GPUs, found 2')", ("2",), 0),
        ("pytest.skip('needs 2 GPUs, found 0')", ("2",), 1),
        ("pytest.skip('NCCL is not here')", ("2",), 1),
        ("pytest.skip('NCCL is not here')", ("1",), 0),
        ("assert False", ("2",), 1),
        ("pass", ("two",), 2),
    ],
)
def test_run_gpu_fails_on_a_skipped_multi_gpu_test(gpu_node, body, args, status):
    done = gpu_node(body, *args)
    assert done.returncode == status, done.stdout + done.stderr


@pytest.mark.parametrize("which, one, two", [("no", True, False), ("only", False, True), ("yes", True, True)])
def test_run_gpu_in_two_parts(gpu_node, which, one, two):
    done = gpu_node("pass", "2", MULTIGPU=which)
    seen = done.stdout.count("1 passed")
    assert done.returncode == 0 and seen == one + two, done.stdout + done.stderr
    assert gpu_node("assert False", "2", MULTIGPU=which).returncode == int(two)


def test_run_gpu_names_a_bad_choice(gpu_node):
    done = gpu_node("pass", "2", MULTIGPU="maybe")
    assert done.returncode == 2 and "MULTIGPU='maybe': must be yes, no or only" in done.stderr


def test_ci_calls_the_test_command_of_the_readme():
    assert "make test" in (ROOT / ".ci" / "run").read_text().splitlines()
    assert "`make test`" in (ROOT / "README.md").read_text()


def test_the_code_passes_the_linter():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.slow
def test_a_real_setup_from_a_tarball_reuses_this_torch(tmp_path):
    keep = shutil.ignore_patterns(".git", ".venv", ".venv.old", "data", "figures", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, tmp_path / "clone", ignore=keep)
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "setup", "TORCH=present", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=tmp_path / "clone", env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    say = "import json, torch, m3cp, importlib.metadata as m; print(json.dumps([torch.__file__, m3cp.__file__, m.version('m3cp')]))"
    python = tmp_path / "clone" / ".venv" / "bin" / "python"
    out = subprocess.run([python, "-c", say], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    torch_file, m3cp_file, version = json.loads(out)
    import torch

    assert torch_file == torch.__file__
    assert Path(m3cp_file).is_relative_to(tmp_path)
    assert version == "0.1.0"
    again = subprocess.run(["make", "setup"], cwd=tmp_path / "clone", env=env, capture_output=True, text=True)
    assert "stands" in again.stdout
