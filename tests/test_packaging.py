"""What is installed, and the decision whether CUDA kernels are built; nothing here builds anything."""

import importlib.metadata
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import types

import pytest

from jax_streamk import _ffi, checks
from jax_streamk.tools import info

ROOT = pathlib.Path(__file__).parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "cmake" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Makes a machine: which versions of nvcc it has in the order they are found, and which GPUs."""
    toolkit = load("cuda_toolkit")

    def make(versions=(), gpus=""):
        found = {}
        for version in versions:
            nvcc = tmp_path / "nvcc{}.{}".format(*version)
            nvcc.touch()
            found[str(nvcc)] = version
        monkeypatch.setattr(toolkit, "_candidates", lambda: [None, *found, str(tmp_path / "missing")])
        monkeypatch.setattr(toolkit, "_version", found.get)
        monkeypatch.setattr(toolkit, "visible_architectures", lambda: gpus)
        return toolkit

    return make


@pytest.mark.parametrize("option", ["OFF", "off"])
def test_off(machine, option):
    assert machine([(13, 0)], "90a").decide(option, "90a") == ("", "", "JAX_STREAMK_CUDA was OFF")


def test_unknown_option(machine):
    with pytest.raises(SystemExit, match="JAX_STREAMK_CUDA=YES: must be ON, OFF or AUTO"):
        machine().decide("YES", "")


def test_on_without_toolkit_names_the_wheels(machine):
    toolkit = machine()
    with pytest.raises(SystemExit, match="at least 12.8") as error:
        toolkit.decide("ON", "")
    assert f"pip install {toolkit.WHEELS}" in str(error.value)


def test_on_with_an_old_toolkit_says_what_was_found(machine):
    with pytest.raises(SystemExit, match=r"found \S+ 12\.4"):
        machine([(12, 4)]).decide("ON", "80")


def test_on_takes_the_first_toolkit_that_serves(machine):
    nvcc, architectures, why = machine([(12, 4), (13, 0), (13, 5)]).decide("ON", "")
    assert nvcc.endswith("nvcc13.0") and architectures == "80;90a" and why == ""


@pytest.mark.parametrize(
    "gpus, named, built",
    [("90a", "", "90a"), ("", "80;90a", "80;90a"), ("89", "80", "80"), ("80;90a", "", "80;90a")],
)
def test_auto_builds_for_what_is_named_or_else_visible(machine, gpus, named, built):
    nvcc, architectures, _ = machine([(13, 0)], gpus).decide("AUTO", named)
    assert nvcc and architectures == built


def test_auto_without_gpu_says_why_not(machine):
    nvcc, _, why = machine([(13, 0)]).decide("AUTO", "")
    assert (
        not nvcc
        and "no GPU" in why
        and "no architectures were named" in why
        and re.search(r"; found \S+/nvcc13\.0 13\.0$", why)
    )


@pytest.mark.parametrize(
    "versions, gpus, option, level",
    [
        ([(13, 0)], "", "AUTO", "WARNING"),
        ([(12, 4)], "90a", "AUTO", "WARNING"),
        ([], "90a", "auto", "WARNING"),
        ([], "", "AUTO", "STATUS"),
        ([(13, 0)], "90a", "OFF", "STATUS"),
        ([(13, 0)], "90a", "AUTO", "STATUS"),
    ],
)
def test_a_build_warns_where_cuda_may_have_been_wanted(machine, versions, gpus, option, level):
    toolkit = machine(versions, gpus)
    assert toolkit.level(option, toolkit.decide(option, "")[0]) == level


def test_a_build_without_cuda_says_why_and_how_to_have_it():
    assert bool(_ffi.without_cuda) != _ffi.has_cuda
    if not _ffi.has_cuda:
        assert re.search(
            r"\. To build them: pip install \. -C cmake\.define\.JAX_STREAMK_CUDA=ON -C cmake\.define",
            _ffi.without_cuda,
        )
        assert _ffi.without_cuda in info._versions()["CUDA compiled against"]


def test_auto_without_toolkit_says_why_not(machine):
    nvcc, _, why = machine(gpus="90a").decide("AUTO", "")
    assert not nvcc and why.startswith("there was no CUDA toolkit of at least 12.8")


@pytest.mark.parametrize("architectures", ["native", "75", "sm_90a", "80,90a", "80;70"])
def test_architectures_are_checked(machine, architectures):
    with pytest.raises(SystemExit, match="must be numbers from 80 on, such as 80;90a"):
        machine([(13, 0)]).decide("ON", architectures)


def test_wheels_count_only_together(monkeypatch):
    toolkit = load("cuda_toolkit")
    monkeypatch.setattr(toolkit.shutil, "which", lambda _: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    nvcc = importlib.metadata.PackagePath("nvidia/cu13/bin/nvcc")
    nvcc.dist = importlib.metadata.distribution("jax")
    installed = {name: [nvcc] for name in toolkit.WHEELS.split()}
    monkeypatch.setattr(toolkit, "wheel_files", lambda name: installed.get(name, []))
    assert [path for path in toolkit._candidates() if path] == [str(nvcc.locate())]
    del installed["nvidia-cuda-cccl"]
    assert not any(toolkit._candidates())


@pytest.mark.parametrize(
    "settings, fetched",
    [
        (None, False),
        ({"cmake.define.JAX_STREAMK_CUDA": "ON"}, True),
        ({"cmake.define.CMAKE_CUDA_ARCHITECTURES": "90a"}, True),
        ({"cmake.define.JAX_STREAMK_CUDA": "OFF", "cmake.define.CMAKE_CUDA_ARCHITECTURES": "90a"}, False),
    ],
)
def test_cutlass_is_fetched_only_for_cuda(machine, monkeypatch, settings, fetched):
    monkeypatch.setitem(sys.modules, "cuda_toolkit", machine([(13, 0)]))
    # A build requirement, not one of the tests.
    for name in ("scikit_build_core", "scikit_build_core.build"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["scikit_build_core"].build = sys.modules["scikit_build_core.build"]
    monkeypatch.delenv("CUDAARCHS", raising=False)
    assert load("build_backend")._builds_cuda(settings) == fetched


def test_metadata():
    metadata = importlib.metadata.metadata("jax-streamk")
    run_time = [r for r in metadata.get_all("Requires-Dist") if "extra" not in r]
    assert sorted(re.match(r"[\w-]+", r)[0] for r in run_time) == ["jax", "numpy", "platformdirs"]
    assert set(metadata.get_all("Provides-Extra")) == {"test", "flax", "tools", "examples"}
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_all("License-File") == ["LICENSE"]
    assert {url.split(", ")[0] for url in metadata.get_all("Project-URL")} == {"Homepage", "Documentation", "Issues"}
    assert "Typing :: Typed" in metadata.get_all("Classifier")


def test_module_is_typed():
    installed = importlib.metadata.distribution("jax-streamk")
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable") or not any(
        file.match("jax_streamk/_ffi*.so") for file in installed.files
    ):
        pytest.skip("jax_streamk was not installed as a wheel")
    assert {"_ffi.pyi", "py.typed"} <= {file.name for file in installed.files}


def test_build_and_run_time_agree_on_the_oldest_jaxlib():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built_on = next(r for r in project["build-system"]["requires"] if r.startswith("jaxlib=="))
    oldest = next(r for r in project["project"]["dependencies"] if r.startswith("jax>="))
    assert oldest.startswith("jax>=" + built_on.removeprefix("jaxlib=="))
    assert built_on == f"jaxlib=={checks._OLDEST_JAX}"


def test_lint_has_the_same_versions_before_a_commit_and_in_ci():
    files = "".join((ROOT / ".ci" / name).read_text() for name in ("lint.txt", "lint-types.txt"))
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", files, re.MULTILINE))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    of_mirrors = dict(re.findall(r"/(?:mirrors-)?(ruff|clang-format)(?:-pre-commit)?\n +rev: v(\S+)", hooks))
    of_mypy = dict(re.findall(r"([\w-]+)==([^],\s]+)", hooks))
    assert of_mirrors | of_mypy == pinned and len(of_mirrors) == 2


def imported(program, cwd):
    """What importing says in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_an_old_jax_is_refused_at_import(tmp_path):
    program = "import jax; jax.__version__ = '0.8.3'; jax.__version_info__ = (0, 8, 3); import jax_streamk"
    said = imported(program, tmp_path)
    assert said == "ImportError: jax_streamk needs jax 0.9.0 or later, and found 0.8.3: pip install -U 'jax>=0.9.0'"


def test_a_source_folder_says_that_it_hides_the_package(tmp_path):
    package = pathlib.Path(checks.__file__).parent
    shutil.copytree(package, tmp_path / "jax_streamk", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # The finder of an editable install, an object among classes, comes before every folder.
    only_paths = "import sys; sys.meta_path[:] = [x for x in sys.meta_path if isinstance(x, type)]; "
    said = imported(only_paths + "sys.path.insert(0, ''); import jax_streamk", tmp_path)
    assert said.startswith(f"ImportError: {tmp_path / 'jax_streamk'} has no compiled module _ffi for Python 3.")
    assert "hides the installed package: start Python elsewhere" in said
