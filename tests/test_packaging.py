"""What is installed, and the decision whether CUDA kernels are built; nothing here builds anything."""

import importlib.metadata
import importlib.util
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import types
import warnings

import jax
import jaxlib
import pytest

from jax_streamk import Device, StreamK, _ffi, checks, compat, device, nvml, plan
from jax_streamk.tools import info

ROOT = pathlib.Path(__file__).parents[1]


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "cmake" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Simulates a machine, given its versions of nvcc in the order in which they are found, and its GPUs."""
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
            r"\. To (build them: pip install \. -C cmake\.define\.JAX_STREAMK_CUDA=ON -C cmake\.define"
            r"|have them: pip install --force-reinstall --no-deps jax-streamk$)",
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


def is_wheel(distribution):
    """Whether it was installed as a wheel; in a clone, the module may lie in the source folder instead."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return not origin.get("dir_info", {}).get("editable") and any(
        file.match("jax_streamk/_ffi*.so") for file in distribution.files
    )


@pytest.fixture
def wheel():
    installed = importlib.metadata.distribution("jax-streamk")
    if not is_wheel(installed):
        pytest.skip("jax_streamk was not installed as a wheel")
    return installed


def test_metadata():
    metadata = importlib.metadata.metadata("jax-streamk")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    run_time = [r for r in metadata.get_all("Requires-Dist") if "extra" not in r]
    assert sorted(re.match(r"[\w-]+", r)[0] for r in run_time) == ["jax", "numpy", "platformdirs"]
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert metadata["License-Expression"] == "Apache-2.0" and metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert urls == project["urls"] and all(url.startswith(urls["Homepage"]) for url in urls.values())
    assert {"Homepage", "Documentation", "Source", "Changelog", "Issues"} == set(urls)
    assert "stream-k" in metadata["Keywords"] and metadata["Requires-Python"] == ">=3.11"
    classifiers = set(metadata.get_all("Classifier"))
    assert "Typing :: Typed" in classifiers
    assert not any(x.startswith("License ::") for x in classifiers), "PEP 639: the expression alone tells"
    # A local version, as of the wheel for CPUs, is the release's.
    assert metadata["Version"].partition("+")[0] == project["version"].partition("+")[0]


def test_module_is_typed(wheel):
    assert {"_ffi.pyi", "py.typed"} <= {file.name for file in wheel.files}


def test_a_wheel_has_the_licences_of_what_is_compiled_in(wheel):
    texts = {
        file.as_posix().split(".dist-info/licenses/")[1]: file.read_text()
        for file in wheel.files
        if "licenses" in file.parts
    }
    assert texts["NOTICE"] == (ROOT / "NOTICE").read_text() and "Apache License" in texts["LICENSE"]
    says = {
        "nanobind/LICENSE": "Redistributions in binary form must reproduce the above copyright",
        "robin-map/LICENSE": "The above copyright notice and this permission notice shall be included",
    }
    if _ffi.has_cuda:
        says["nvidia-cutlass/LICENSE.txt"] = "Redistributions in binary form must reproduce the above copyright"
    assert texts.keys() - {"NOTICE", "LICENSE"} == says.keys()
    for name, sentence in says.items():
        assert sentence in " ".join(texts[name].split()) and name in texts["NOTICE"]
        # NOTICE names the holders of the copyright as the texts do.
        line = next(line for line in texts[name].splitlines() if line.startswith("Copyright"))
        assert line in texts["NOTICE"]


def test_a_wheel_of_the_stable_abi_says_so(wheel):
    tags = re.findall(r"^Tag: (\S+)$", wheel.read_text("WHEEL"), re.MULTILINE)
    is_stable = any(file.match("jax_streamk/_ffi.abi3.so") for file in wheel.files)
    assert tags and all(tag.startswith("cp312-abi3-") for tag in tags) == is_stable


@pytest.mark.parametrize("project", ["CUTLASS", "Eigen", "nanobind", "robin-map"])
def test_notice_tells_licence_and_source_of_what_is_compiled_in(project):
    (part,) = (x for x in (ROOT / "NOTICE").read_text().split("\n\n") if re.match(rf"{project}\b", x))
    assert re.search(r"^  Copyright ", part, re.MULTILINE)
    assert re.search(r"^  Licence: (BSD-3-Clause|MPL-2\.0|MIT), ", part, re.MULTILINE)
    assert re.search(r"^  Source: https://", part, re.MULTILINE)


def test_notice_tells_the_version_of_cutlass_that_is_built():
    backend = (ROOT / "cmake" / "build_backend.py").read_text()
    version = re.search(r"nvidia-cutlass==(\d+\.\d+\.\d+)", backend)[1]
    assert f"cutlass, version {version}\n" in (ROOT / "NOTICE").read_text()


@pytest.fixture
def licenses(monkeypatch):
    """cmake/licenses.py, and wheels in the build environment: a file's text by its path, by wheel."""
    toolkit = load("cuda_toolkit")
    monkeypatch.setitem(sys.modules, "cuda_toolkit", toolkit)
    wheels = {}

    def files(name):
        return [
            types.SimpleNamespace(
                name=path.rsplit("/", 1)[-1],
                parts=path.split("/"),
                as_posix=lambda path=path: path,
                read_text=lambda text=text: text,
            )
            for path, text in wheels.get(name, {}).items()
        ]

    monkeypatch.setattr(toolkit, "wheel_files", files)
    return load("licenses"), wheels


def test_licences_are_those_of_the_build_environment(licenses, tmp_path):
    script, wheels = licenses
    wheels["nvidia-cutlass"] = {"cutlass-4.dist-info/licenses/LICENSE.txt": "BSD\n", "cutlass/LICENSE.txt": "another"}
    wheels["nanobind"] = {
        "nanobind-3.dist-info/licenses/LICENSE": "BSD, too\n",
        "nanobind/ext/robin_map/include/tsl/robin_hash.h": "/**\n * MIT\n *\n * Copyright\n */\n/* a class */\n",
    }
    script.main(tmp_path / "licenses", "nanobind", "nvidia-cutlass")
    found = {
        path.relative_to(tmp_path / "licenses").as_posix(): path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert found == {
        "nanobind/LICENSE": "BSD, too\n",
        "nvidia-cutlass/LICENSE.txt": "BSD\n",
        "robin-map/LICENSE": "MIT\n\nCopyright\n",
    }


@pytest.mark.parametrize(
    "files, missing",
    [
        ({}, "nanobind, robin-map"),
        ({"nanobind-3.dist-info/licenses/LICENSE": "BSD"}, "robin-map"),
        ({"nanobind-3.dist-info/LICENSE": "BSD", "tsl/robin_hash.h": "#pragma once"}, "robin-map"),
    ],
)
def test_a_build_without_a_licence_fails(licenses, files, missing):
    script, wheels = licenses
    wheels["nanobind"] = files
    with pytest.raises(SystemExit, match=f"nanobind: no licence of {missing} in the build environment"):
        script.licenses_of("nanobind")


def test_a_source_distribution_can_be_built_and_tested():
    """Its own tests run in it, where this is asked of what was unpacked."""
    files = ["CMakeLists.txt", "LICENSE", "NOTICE", "README.md", "CHANGELOG.md", ".ci/lint.txt", "cmake/licenses.py"]
    folders = ["benchmarks", "cutlass_kernels", "docs", "examples", "ffi", "tests"]
    assert not [name for name in files if not (ROOT / name).is_file()]
    assert not [name for name in folders if not any((ROOT / name).iterdir())]


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


def test_the_site_is_built_with_pinned_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = {re.match(r"[\w-]+", r)[0] for r in project["project"]["optional-dependencies"]["docs"]}
    pinned = re.findall(r"^([\w-]+)==\S+$", (ROOT / ".ci" / "docs.txt").read_text(), re.MULTILINE)
    assert {*pinned, "flax"} == wanted


def imported(program, cwd):
    """What importing says in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def imported_from(folder, module=None):
    """What importing a copy of the source says, which has no compiled module or this one."""
    package = pathlib.Path(checks.__file__).parent
    shutil.copytree(package, folder / "jax_streamk", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if module is not None:
        (folder / "jax_streamk" / "_ffi.abi3.so").write_bytes(module)
    # The finder of an editable install, an object among classes, comes before every folder.
    only_paths = "import sys; sys.meta_path[:] = [x for x in sys.meta_path if isinstance(x, type)]; "
    return imported(only_paths + "sys.path.insert(0, ''); import jax_streamk", folder)


def test_an_old_jax_is_refused_at_import(tmp_path):
    program = "import jax; jax.__version__ = '0.8.3'; jax.__version_info__ = (0, 8, 3); import jax_streamk"
    said = imported(program, tmp_path)
    assert said == "ImportError: jax_streamk needs jax 0.9.0 or later, and found 0.8.3: pip install -U 'jax>=0.9.0'"


def test_a_source_folder_says_that_it_hides_the_package(tmp_path):
    said = imported_from(tmp_path)
    assert said.startswith(f"ImportError: {tmp_path / 'jax_streamk'} has no compiled module _ffi for Python 3.")
    assert "hides the installed package: start Python in another folder" in said


def test_a_free_threaded_python_is_named(monkeypatch):
    """Its modules are not those of the Python of the same number."""
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "abiflags", "t")
    with pytest.raises(ImportError, match=r"has no compiled module _ffi for Python 3\.\d+t\. "):
        checks.check_installation()


def test_a_module_that_does_not_load_says_what_to_do(tmp_path):
    said = imported_from(tmp_path, b"cut off")
    assert said.startswith("ImportError: the compiled module of jax_streamk ")
    assert f"jaxlib {jaxlib.__version__}" in said and "pip install --force-reinstall --no-deps jax-streamk" in said


def test_products_are_xlas_where_jaxlib_refuses_our_kernels(tmp_path):
    """As it does if they were built for a newer one."""
    program = """
import warnings
import jax, jax.numpy as jnp, numpy as np

def refuse(*args, **kwargs):
    raise RuntimeError("FFI API version 9.9 is not supported")

jax.ffi.register_ffi_target = refuse
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import jax_streamk as sk
    x, y = np.ones((40, 64), np.float32), np.ones((64, 48), np.float32)
    for f in (sk.matmul, sk.accelerate(jnp.matmul)):
        assert (jax.jit(f)(x, y) == 64).all()
    loss = lambda x, y: sk.linear(x, y, activation="silu").sum()
    assert jax.jit(jax.grad(loss))(x, y).shape == x.shape
    assert sk.ragged_dot(x, y[None], np.array([40])).shape == (40, 48)
ours = [str(x.message) for x in told if "jax_streamk" in str(x.message)]
assert len(ours) == 1 and "9.9 is not supported. All products are XLA's" in ours[0], ours
assert sk.plan(x, y).kernel is None and "refuses the kernels" in sk.plan(x, y).reasons[0]
try:
    sk.matmul(x, y, schedule=sk.SplitK(2))
except ValueError as error:
    assert "refuses the kernels of jax_streamk" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


class Nvml:
    """A driver's library with GPUs: (name, major, minor)."""

    def __init__(self, *gpus, cuda=99000, status=0):
        self.gpus, self.cuda, self.status = gpus, cuda, status

    def nvmlInitWithFlags(self, flags):
        return self.status

    def nvmlShutdown(self):
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, version):
        version._obj.value = self.cuda
        return 0

    def nvmlDeviceGetCount_v2(self, count):
        count._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):
        device._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetName(self, device, name, size):
        name.value = self.gpus[device.value - 1][0].encode()
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device, major, minor):
        _, major._obj.value, minor._obj.value = self.gpus[device.value - 1]
        return 0


T4, H100 = ("Tesla T4", 7, 5), ("NVIDIA H100 80GB HBM3", 9, 0)


@pytest.fixture
def driver(monkeypatch):
    """Makes a machine whose driver has GPUs, and a JAX that uses them."""

    def install(*gpus, **kwargs):
        monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: Nvml(*gpus, **kwargs))
        monkeypatch.setattr(compat, "may_use_cuda", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


def warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        device.check_gpus()
    return [str(warning.message) for warning in caught]


def test_the_driver_tells_of_its_gpus(driver):
    driver(T4, H100, cuda=12080)
    assert nvml.driver() == (12080, [("Tesla T4", 75), ("NVIDIA H100 80GB HBM3", 90)])
    driver(T4, status=9)  # NVML_ERROR_DRIVER_NOT_LOADED
    assert nvml.driver() is None


def test_a_machine_may_have_no_driver(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(nvml.ctypes, "CDLL", missing)
    assert nvml.driver() is None


def test_a_build_without_cuda_beside_a_gpu_says_so(driver, monkeypatch):
    driver(H100, H100)
    monkeypatch.setattr(_ffi, "has_cuda", False)
    monkeypatch.setattr(_ffi, "without_cuda", "it was asked for. To build them: do")
    (said,) = warned()
    assert said == (
        "this build of jax_streamk has no kernels that run on NVIDIA H100 80GB HBM3 (compute capability 9.0): "
        "when it was built, it was asked for. To build them: do"
    )


@pytest.mark.parametrize("gpus, says", [((T4,), "Tesla T4 (compute capability 7.5)"), ((T4, H100), ""), ((H100,), "")])
def test_gpus_too_old_for_every_kernel(driver, monkeypatch, gpus, says):
    driver(*gpus)
    monkeypatch.setattr(_ffi, "has_cuda", True)
    assert [says in said and "compute capability 8.0 or later" in said for said in warned()] == [True] * bool(says)


@pytest.mark.parametrize("runs, says", [(12080, ["built with CUDA 13.0", "runs CUDA 12.8 at most"]), (13010, [])])
def test_a_driver_too_old_for_the_cuda_of_this_build(driver, monkeypatch, runs, says):
    driver(H100, cuda=runs)
    monkeypatch.setattr(_ffi, "has_cuda", True)
    monkeypatch.setattr(_ffi, "cuda_version", 13000)
    said = warned()
    assert len(said) == bool(says) and all(x in said[0] for x in says)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_not_asked_for(driver, monkeypatch, hidden):
    driver(T4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not warned()


def test_a_jax_for_cpus_is_not_warned(driver, monkeypatch):
    driver(T4)
    monkeypatch.setattr(compat, "may_use_cuda", lambda: False)
    assert not warned()


@pytest.mark.left_to_xla
def test_kernels_begin_at_the_oldest_architecture():
    a, b = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((64, 4096), (4096, 4096)))
    oldest, older = (Device("cuda", arch, 72) for arch in (device.OLDEST_ARCH, device.OLDEST_ARCH - 5))
    assert plan(a, b, schedule=StreamK(), device=oldest).kernel
    # As a described kernel says it, and a compiled one.
    with pytest.raises(ValueError, match=f"compiled for sm_90a; the device is sm_{older.arch}|or newer; the device"):
        plan(a, b, schedule=StreamK(), device=older)
    assert "falls back to XLA: kernels need compute capability 8.0 or later, and this GPU has 7.5" in str(
        plan(a, b, device=older)
    )


FIRST_IMPORT = """
import ctypes, sys, warnings
sys.path.insert(0, {folder!r})
from nvml_of_a_test import Nvml
real = ctypes.CDLL
ctypes.CDLL = lambda name, *rest: Nvml(("Tesla T4", 7, 5)) if "nvidia-ml" in str(name) else real(name, *rest)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import jax_streamk
    import jax_streamk
from jax._src import xla_bridge
print([str(x.message) for x in caught if "jax_streamk" in str(x.message)], xla_bridge.backends_are_initialized())
"""


@pytest.mark.parametrize("platforms, times", [("", 1), ("cuda,cpu", 1), ("cpu", 0)])
def test_the_first_import_warns_once_and_leaves_jax_alone(tmp_path, platforms, times):
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_plugins" / "xla_cuda13" / "__init__.py").touch()
    (tmp_path / "nvml_of_a_test.py").write_text(inspect.getsource(Nvml))
    program = FIRST_IMPORT.format(folder=str(tmp_path))
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd="/",
        env=environment | {"JAX_PLATFORMS": platforms},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("has no kernels that run on Tesla T4") == times and done.stdout.endswith(" False\n")
