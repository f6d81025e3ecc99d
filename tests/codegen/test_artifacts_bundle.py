# SPDX-License-Identifier: Apache-2.0
"""Bundles: built without a GPU, loaded without the CuTe DSL, refused where they do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from cudnn_blocks import (
    BundleError,
    CompileRefusedError,
    ContractError,
    DriverError,
    LifecycleError,
    LinkError,
    NotServedError,
    warm,
)
from cudnn_blocks.artifacts import (
    BUNDLE_VARIABLE,
    CACHE_VARIABLE,
    Bundle,
    BundleManifest,
    build_bundle,
    bundle,
    link,
    load_bundle,
    manifest,
    refuse_compiles,
)
from cudnn_blocks.artifacts.bundle import MANIFEST_MEMBER
from cudnn_blocks.artifacts.usage import usage_of
from cudnn_blocks.cli import main
from cudnn_blocks.deploy import DeployFile
from cudnn_blocks.stages import kernel_stage, toolchain
from cudnn_blocks.stages.bundle_store import second_level
from cudnn_blocks.stages.kernel_cache import KernelCache, KernelCacheStats
from cudnn_blocks.support import SupportReports
from tests.codegen.cubin_usage import usage_of as cuobjdump_usage

pytestmark = pytest.mark.timeout(300)  # the first one waits for the bundle: a fresh process, cold
WAIT_S = 280
DEPLOY: dict[str, Any] = {
    "targets": ["sm_90a"],
    "plans": [
        {"op": "causal-conv1d-update", "channels": 661, "indices": True, "on_bad_index": "report"},
        {
            "op": "gated-attention-block",
            "name": "layer",
            "d_model": 512,
            "h_q": 4,
            "h_kv": 2,
            "d_head": 64,
            "rope_dim": 32,
            "tokens": 256,
            "fuse_norm_rope": True,
            "fuse_gate": True,
        },
        {
            "op": "causal-conv3d-with-cache",
            "frames": 4,
            "height": 16,
            "width": 16,
        },
    ],
}
NUM_KERNELS = 4
"""One, the block's host call that holds three, and a packing beside a convolution."""


def plans(**changes: Any) -> list[Any]:
    deploy = DeployFile.model_validate_json(json.dumps(DEPLOY))
    return [
        request.model_copy(update=changes.get(request.op, {})).plan("sm_90a")
        for request in deploy.plans
    ]


def conv1d(channels: int, target: str = "sm_90a") -> Any:
    request = DeployFile.model_validate_json(json.dumps(DEPLOY)).plans[0]
    return request.model_copy(update={"channels": channels}).plan(target)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A bundle that the command line has built, in a process that sees no GPU."""
    folder = tmp_path_factory.mktemp("bundle")
    (folder / "deploy.json").write_text(json.dumps(DEPLOY))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cudnn_blocks", "compile", "--json", "--jobs", "1"),
            *("--file", str(folder / "deploy.json"), "-o", str(folder / "model.cbb")),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", CACHE_VARIABLE: str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr
    said = BundleManifest.model_validate_json(done.stdout)
    assert (said.target, len(said.kernels)) == ("sm_90a", NUM_KERNELS)
    assert sorted(one.name for one in folder.iterdir()) == ["cache", "deploy.json", "model.cbb"]
    return folder / "model.cbb"


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """A process that has loaded nothing yet, over an empty disk cache."""
    monkeypatch.setattr(bundle, "_bundles", [])
    monkeypatch.setattr(bundle, "_asked_by_environment", None)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    yield
    refuse_compiles(False)


@pytest.fixture
def kernels(monkeypatch) -> KernelCache:
    """A kernel cache as that of a fresh process."""
    made = KernelCache(second_level)
    monkeypatch.setattr(kernel_stage, "KERNELS", made)
    return made


SERVE = """
import json, sys
import torch
sys.modules["cutlass"] = None  # whoever imports it fails
from cudnn_blocks.artifacts import load_bundle, refuse_compiles
from cudnn_blocks.cli import main
from cudnn_blocks.deploy import DeployFile
from cudnn_blocks.stages.kernel_cache import KERNELS
path, deploy = sys.argv[1], sys.argv[2]
if path:
    load_bundle(path)
refuse_compiles()
plans = [request.plan("sm_90a") for request in DeployFile.model_validate_json(deploy).plans]
for plan in plans:
    plan.compile()
calls = [plans[0]._stages[0]._call, plans[1]._one_call._call]
calls += [stage._call for stage in plans[2]._stages]
said = []
for call in calls:
    try:
        call(1)
    except TypeError as error:
        said.append(str(error).partition(" when")[0])
stats = KERNELS.stats()
print(json.dumps([stats.compiled, stats.loaded, said]))
"""


@pytest.mark.parametrize("asks", ["load_bundle", "environment"])
def test_a_fresh_process_serves_from_it_without_the_dsl(built, asks):
    environment = {**os.environ, CACHE_VARIABLE: "off"}
    if asks == "environment":
        environment[BUNDLE_VARIABLE] = str(built)
    path = str(built) if asks == "load_bundle" else ""
    done = subprocess.run(
        [sys.executable, "-c", SERVE, path, json.dumps(DEPLOY)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    compiled, loaded, said = json.loads(done.stdout)
    assert (compiled, loaded) == (0, NUM_KERNELS)
    assert said == [f"Expects {count} parameters" for count in (8, 15, 5, 4)]


def test_what_it_lacks_is_compiled_or_refused(built, kernels):
    load_bundle(built)
    conv1d(661).compile()
    assert kernels.stats() == KernelCacheStats(compiled=0, found=0, loaded=1)
    refuse_compiles()
    with pytest.raises(
        CompileRefusedError, match=r"CausalConv1dUpdateKernel for sm_90a.*channels=673"
    ):
        conv1d(673).compile()
    with pytest.raises(CompileRefusedError, match="for sm_80 is in no bundle"):
        conv1d(661, "sm_80").compile()
    refuse_compiles(False)
    conv1d(673).compile()
    assert kernels.stats().compiled == 1
    refuse_compiles()
    conv1d(673).compile()  # this process has it


def test_a_refused_compile_may_still_find_its_kernel_on_disk(built, kernels, monkeypatch):
    conv1d(677).compile()
    later = KernelCache(second_level)
    monkeypatch.setattr(kernel_stage, "KERNELS", later)
    refuse_compiles()
    conv1d(677).compile()
    assert later.stats() == KernelCacheStats(compiled=0, found=0, loaded=1)


def test_warming_takes_what_is_there_and_refuses_as_compile_does(built):
    load_bundle(built)
    refuse_compiles()
    plan = conv1d(661)
    warm([plan], progress=False)
    assert callable(plan._stages[0]._call)
    with pytest.raises(CompileRefusedError, match="channels=683"):
        warm([conv1d(683), conv1d(691)], jobs=2, progress=False)


def test_with_a_bundle_no_dsl_need_be_installed(built, monkeypatch):
    monkeypatch.setattr(toolchain, "dsl_version", lambda: None)
    assert not conv1d(661).probe()
    load_bundle(built)
    assert conv1d(661).probe()


# Damage.


def test_a_flipped_byte_is_an_error_or_nothing_that_counts(built, tmp_path):
    data = built.read_bytes()
    sound = Bundle(built)
    refused = 0
    path = tmp_path / "flipped.cbb"
    for place in sorted({*range(0, len(data), len(data) // 97), *range(len(data) - 60, len(data))}):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x20]) + data[place + 1 :])
        try:
            found = Bundle(path)
        except BundleError:
            refused += 1
        else:  # a time stamp, say
            assert (found.manifest, found._libraries) == (sound.manifest, sound._libraries)
    assert refused > 97


@pytest.mark.parametrize("keeps", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_an_error(built, tmp_path, keeps):
    path = tmp_path / "short.cbb"
    path.write_bytes(built.read_bytes()[: int(keeps * built.stat().st_size)])
    with pytest.raises(BundleError, match=r"short\.cbb: file: expected a bundle"):
        load_bundle(path)


def test_a_missing_file_is_an_error_also_when_the_environment_names_it(tmp_path, monkeypatch):
    with pytest.raises(BundleError, match="No such file"):
        load_bundle(tmp_path / "nowhere.cbb")
    monkeypatch.setenv(BUNDLE_VARIABLE, str(tmp_path / "nowhere.cbb"))
    with pytest.raises(BundleError, match="No such file"):
        conv1d(701).compile()


def rewritten(built: Path, path: Path, change: Any) -> Path:
    """The bundle with another manifest and other members, as ``change`` makes them."""
    with zipfile.ZipFile(built) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    fields = json.loads(members.pop(MANIFEST_MEMBER))
    change(fields, members)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MANIFEST_MEMBER, json.dumps(fields))
        for name, data in members.items():
            archive.writestr(name, data)
    return path


MISMATCHES = {
    "format": lambda fields, _: fields.update(format=2),
    "cudnn_blocks": lambda fields, _: fields["versions"].update(cudnn_blocks="0.0.1"),
    "apache-tvm-ffi": lambda fields, _: fields["versions"].update({"apache-tvm-ffi": "0.0.1"}),
    "nvidia-cutlass-dsl": lambda fields, _: fields["versions"].update({"nvidia-cutlass-dsl": "4"}),
    "sources": lambda fields, _: fields.update(sources="0" * 64),
    "machine": lambda fields, _: fields.update(machine="Linux riscv64"),
    "cpu_features": lambda fields, _: fields["cpu_features"].append("avx9000"),
    "target": lambda fields, _: fields.update(target=7),
    "kernels": lambda fields, _: fields.pop("kernels"),
    "author": lambda fields, _: fields.update(author="someone"),
    "kernels.0.sha256": lambda fields, _: fields["kernels"][0].update(sha256=None),
}


@pytest.mark.parametrize("field", MISMATCHES)
def test_what_does_not_fit_is_named(built, tmp_path, field):
    path = rewritten(built, tmp_path / "other.cbb", MISMATCHES[field])
    with pytest.raises(BundleError, match=r"other\.cbb") as error:
        load_bundle(path)
    assert error.value.field == field


def test_a_version_of_what_only_compiles_counts_where_it_is_installed(built, tmp_path, monkeypatch):
    path = rewritten(built, tmp_path / "other.cbb", MISMATCHES["nvidia-cutlass-dsl"])
    installed = manifest.installed_version
    monkeypatch.setattr(
        manifest,
        "installed_version",
        lambda name: manifest.NOT_INSTALLED if "cutlass" in name else installed(name),
    )
    load_bundle(path)


def test_a_library_that_was_exchanged_is_named(built, tmp_path):
    def exchange(_fields, members):
        first, second, *_ = members
        members[first] = members[second]

    path = rewritten(built, tmp_path / "other.cbb", exchange)
    with pytest.raises(BundleError, match=r"\.so: expected sha256"):
        load_bundle(path)

    def lose(_fields, members):
        members.pop(next(iter(members)))

    with pytest.raises(BundleError, match=r"\.so: expected what was written"):
        load_bundle(rewritten(built, tmp_path / "lost.cbb", lose))


def test_a_library_that_does_not_load_is_an_error(built, tmp_path, kernels):
    """Sound as far as the manifest goes; nobody but its maker can have put it there."""
    import hashlib

    junk = b"not a shared library"

    def spoil(fields, members):
        for one in fields["kernels"]:
            one.update(sha256=hashlib.sha256(junk).hexdigest(), size_bytes=len(junk))
        members.update(dict.fromkeys(members, junk))

    load_bundle(rewritten(built, tmp_path / "junk.cbb", spoil))
    with pytest.raises(BundleError, match="library: expected one that loads here"):
        conv1d(661).compile()


def test_a_bundle_for_another_gpu_or_cuda_is_refused(built, monkeypatch):
    monkeypatch.setattr(manifest, "present_targets", lambda: {"sm_90a", "sm_100a"})
    load_bundle(built)
    monkeypatch.setattr(manifest, "present_targets", lambda: {"sm_100a"})
    with pytest.raises(BundleError, match="target: expected sm_100a, the GPUs .*, got sm_90a"):
        load_bundle(built)
    monkeypatch.setattr(manifest, "present_targets", set)
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    with pytest.raises(BundleError, match="cuda: expected 11, which torch is built with"):
        load_bundle(built)


# Building.


def test_equal_kernels_make_equal_bundles(tmp_path):
    for name in ("a.cbb", "b.cbb"):
        build_bundle([conv1d(709)], tmp_path / name, progress=False)
    assert (tmp_path / "a.cbb").read_bytes() == (tmp_path / "b.cbb").read_bytes()


def test_what_cannot_be_bundled_is_refused(tmp_path):
    path = tmp_path / "model.cbb"
    with pytest.raises(ContractError, match="plans: expected kernels for one GPU target, got no"):
        build_bundle([conv1d(661, "cpu")], path)
    with pytest.raises(ContractError, match="got kernels for sm_80, sm_90a"):
        build_bundle([conv1d(661), conv1d(661, "sm_80")], path)
    with pytest.raises(NotServedError, match="width"):
        build_bundle(plans(**{"causal-conv1d-update": {"width": 9, "state_len": 9}}), path)
    with pytest.raises(TypeError, match="plans: expected APIBase"):
        build_bundle([object()], path)
    with pytest.raises(ContractError, match="jobs: expected a positive int"):
        build_bundle([conv1d(661)], path, jobs=0)
    plan = conv1d(661, "cpu")
    plan.compile()
    with pytest.raises(LifecycleError, match="not compiled yet"):
        build_bundle([plan], path)
    assert not path.exists()


def test_a_disk_that_refuses_leaves_the_bundle_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "model.cbb"
    path.write_bytes(b"the old one")
    build_bundle([conv1d(719)], tmp_path / "other.cbb", progress=False)

    def refuse(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", refuse)
    with pytest.raises(OSError, match="No space left"):
        build_bundle([conv1d(719)], path, progress=False)
    assert path.read_bytes() == b"the old one"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["cache", "model.cbb", "other.cbb"]


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler", "needs a C compiler and linker, and 'no-such-compiler' is not on"),
        ("false", "false could not link a kernel"),
        ("cc -lno_such_library", "could not link a kernel: .*no_such_library"),
    ],
)
def test_a_missing_or_failing_linker_is_named(tmp_path, monkeypatch, compiler, message):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(LinkError, match=message):
        link.link_library(link._SHIM.with_name("runtime_shim.c"), tmp_path / "k.so", "13")


def test_a_missing_static_runtime_and_a_missing_symbol_are_named(tmp_path):
    with pytest.raises(LinkError, match="nvidia-cutlass-dsl-libs-cu99 is not installed"):
        link.link_library(tmp_path / "k.o", tmp_path / "k.so", "99")
    source = tmp_path / "k.c"
    source.write_text("int from_a_newer_dsl(void); int call(void) { return from_a_newer_dsl(); }")
    with pytest.raises(LinkError, match="nothing defines from_a_newer_dsl"):
        link.link_library(source, tmp_path / "k.so", "13")


# What is in it.


def test_registers_are_those_that_cuobjdump_reads(built, tmp_path):
    with zipfile.ZipFile(built) as archive:
        libraries = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    assert len(libraries) == NUM_KERNELS
    count = 0
    for library in libraries:
        start = library.index(b"\x7fELF", 1)
        theirs = {one.name: one for one in cuobjdump_usage(library[start:], tmp_path)}
        for ours in usage_of(library):
            count += 1
            one = theirs[ours.kernel]
            got = (ours.registers, ours.spill_bytes, ours.static_smem_bytes)
            assert got == (one.registers, one.stack_bytes + one.local_bytes, one.shared_bytes)
            assert str(ours) in ours.kernel
    assert count >= NUM_KERNELS + 2  # the block's host call has three kernels


def test_probing_with_compile_adds_every_kernel():
    arguments = ["probe", "causal-conv1d-update", "--channels", "727", "--target", "sm_90a"]
    result = CliRunner().invoke(main, [*arguments, "--compile", "--json"])
    assert result.exit_code == 0, result.output
    (report,) = SupportReports.model_validate_json(result.output).root
    assert len(report.kernels) == 2  # for a few rows, and for many
    assert all(16 <= kernel.registers <= 255 for kernel in report.kernels)
    assert all(kernel.spill_bytes == 0 for kernel in report.kernels)
    table = CliRunner().invoke(main, [*arguments, "--compile"]).output
    assert table.count("CausalConv1dUpdateKernel") == 2


def test_code_without_kernels_is_not_taken_for_code_without_registers():
    with pytest.raises(DriverError, match="no device code was found"):
        usage_of(b"\x7fELF of something else" * 9)
