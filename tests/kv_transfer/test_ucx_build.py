"""Finding UCX and building the shim: what is missing is named, what is built is kept, what is there is told."""

import ctypes
import os
import stat
from pathlib import Path

import pytest

from kv_transfer.transport import TransportConfig
from kv_transfer.ucx import build, report, tuning
from kv_transfer.ucx.build import Installation
from kv_transfer.ucx.library import MAX_REPORT, Context
from protocol.errors import ConfigError


def headers(folder: Path, version: str) -> Path:
    api = folder / "ucp" / "api"
    api.mkdir(parents=True)
    major, minor = version.split(".")
    (api / "ucp_version.h").write_text(f"#define UCP_API_MAJOR    {major}\n#define UCP_API_MINOR    {minor}\n")
    return folder


def wheel(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = folder / "libucx"
    headers(package / "include", version)
    (package / "lib" / "ucx").mkdir(parents=True)
    (package / "lib" / "libucp.so").touch()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))
    return package


@pytest.fixture
def no_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.ctypes.util, "find_library", lambda _: None)


def test_without_ucx_it_says_what_to_install(no_system, monkeypatch) -> None:
    monkeypatch.setattr(build, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"the system has no libucp; the package libucx is not installed.*libucx-dev"):
        build.find_ucx()
    found = report.describe()
    assert not found.usable
    assert "libucx-cu12" in str(found)


def test_the_system_comes_before_the_wheel(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build.ctypes.util, "find_library", lambda name: f"lib{name}.so.0")
    monkeypatch.setattr(build, "SYSTEM_INCLUDES", (tmp_path / "none", headers(tmp_path / "system", "1.15")))
    wheel(tmp_path, "1.22", monkeypatch)
    found = build.find_ucx()
    assert (found.version, found.libraries) == ((1, 15), None)


def test_a_system_library_without_headers_gives_way_to_the_wheel(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(build.ctypes.util, "find_library", lambda name: f"lib{name}.so.0")
    monkeypatch.setattr(build, "SYSTEM_INCLUDES", (tmp_path / "none",))
    package = wheel(tmp_path, "1.22", monkeypatch)
    assert build.find_ucx().libraries == package / "lib"


def test_an_old_ucx_is_refused_by_its_number(no_system, tmp_path, monkeypatch) -> None:
    wheel(tmp_path, "1.11", monkeypatch)
    with pytest.raises(ConfigError, match=r"is 1\.11, older than 1\.13"):
        build.find_ucx()


def compiler(folder: Path, script: str) -> None:
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


UCX = Installation("a UCX", Path("/include"), Path("/lib"), (1, 22))


def test_a_shim_is_built_once_and_again_for_another_release(tmp_path, monkeypatch) -> None:
    (tmp_path / "bin").mkdir()
    compiler(tmp_path / "bin", f'echo built >> {tmp_path}/log; echo "$@" > "$2"')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    first = build.built(UCX, tmp_path / "cache")
    assert build.built(UCX, tmp_path / "cache") == first
    assert "-I/include" in first.read_text()
    assert "-rpath,/lib" in first.read_text()
    other = build.built(Installation("a UCX", Path("/include"), Path("/lib"), (1, 23)), tmp_path / "cache")
    assert other != first
    assert (tmp_path / "log").read_text().count("built") == 2
    assert sorted((tmp_path / "cache").iterdir()) == sorted([first, other])


def test_a_compiler_that_fails_leaves_nothing_and_is_quoted(tmp_path, monkeypatch) -> None:
    compiler(tmp_path, "echo 'shim.c:12: no such header' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(ConfigError, match=r"cannot build shim\.c with a UCX: shim\.c:12: no such header"):
        build.built(UCX, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_without_a_compiler_it_says_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs a C compiler"):
        build.built(UCX, tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match="cannot keep the ucx transport's library in"):
        build.built(UCX, tmp_path / "cache")


def test_what_the_user_sets_stands() -> None:
    assert tuning.settings({}) == dict(tuning.SETTINGS)
    assert "ZCOPY_THRESH" not in tuning.settings({"UCX_ZCOPY_THRESH": "0"})
    assert tuning.process_settings({}) == {"LOG_LEVEL": "fatal", "MEMTYPE_CACHE": "n"}
    assert tuning.process_settings({"UCX_LOG_LEVEL": "info"}) == {"MEMTYPE_CACHE": "n"}


def test_transports_are_read_from_what_ucx_prints() -> None:
    text = (
        "# UCP context\n#            md 0  :  tcp\n"
        "#      resource 0  :  md 0  dev 0  flags -- tcp/eth0\n#      resource 1  :  md 0  dev 1  flags -- tcp/lo\n"
        "#      resource 2  :  md 1  dev 2  flags -- rc_mlx5/mlx5_0:1\n"
    )
    assert report.resources(text) == ("tcp", "rc_mlx5")


@pytest.mark.ucx
def test_the_report_tells_of_rdma_or_why_there_is_none() -> None:
    found = report.describe()
    if not found.usable:
        pytest.skip(found.reason)
    assert "tcp" in found.transports
    assert found.rdma == (not found.reason)
    assert found.version in str(found)


def test_what_ucx_may_go_by_is_ours_to_say() -> None:
    assert "TLS" not in tuning.settings({})
    assert tuning.settings({"UCX_TLS": "rc"}, tls="tcp")["TLS"] == "tcp"
    for wrong in ("tcp\0", "TCP", "x" * 256):
        with pytest.raises(ConfigError, match="ucx_tls must be names parted by commas"):
            TransportConfig(ucx_tls=wrong)


@pytest.mark.ucx
@pytest.mark.parametrize(("tls", "found"), [("tcp", {"tcp"}), ("posix", {"posix"})])
def test_ucx_goes_by_nothing_else(tls: str, found: set[str]) -> None:
    here = report.describe()
    if not here.usable:
        pytest.skip(here.reason)
    memory = ctypes.create_string_buffer(4096)
    context = Context(ctypes.addressof(memory), len(memory), writable=True, tls=tls)
    try:
        text = ctypes.create_string_buffer(MAX_REPORT)
        context.library.calls.kvf_describe(context.handle, None, text, len(text))
    finally:
        context.free()
    assert set(report.resources(text.value.decode())) == found
