"""Whether RDMA devices of this machine reach the memory of a GPU: what is found, and what it comes to.

UCX asks its memory domains, of which an RDMA device has one: it registers a GPU's memory by a kernel module of NVIDIA's
(nvidia_peermem), or by a dmabuf that the GPU's driver hands out.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from kv_transfer.cuda_ipc.driver import OWNER, Attribute, Device, Driver
from kv_transfer.transport import TransportConfig
from kv_transfer.ucx import tuning
from kv_transfer.ucx.library import CUDA, MAX_REPORT, Context
from protocol.errors import ConfigError

RDMA_COMPONENT = "ib"
"""UCX's name for whatever speaks verbs, over InfiniBand or Ethernet."""


@dataclass(frozen=True, slots=True)
class Domain:
    """One of UCX's memory domains.

    Attributes:
        component: what kind it is.
        name: of the device.
        cuda: whether it registers memory of CUDA devices.
        dmabuf: whether it registers what is handed to it as a dmabuf.
    """

    component: str
    name: str
    cuda: bool
    dmabuf: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What there is.

    Attributes:
        ucx: of which UCX it was asked, in words.
        knows_cuda: whether that UCX moves memory of CUDA devices.
        domains: of that UCX.
        gpu_by_rdma: whether the GPU lets RDMA devices at its memory.
        gpu_dmabuf: whether its driver hands out dmabufs of it.
        gpu_shows: whether what RDMA has written can be made visible to its kernels.
    """

    ucx: str
    knows_cuda: bool
    domains: tuple[Domain, ...]
    gpu_by_rdma: bool
    gpu_dmabuf: bool
    gpu_shows: bool

    @property
    def by(self) -> tuple[str, ...]:
        """Names of the RDMA devices that reach the GPU's memory."""
        return tuple(
            domain.name
            for domain in self.domains
            if domain.component == RDMA_COMPONENT and (domain.cuda or (domain.dmabuf and self.gpu_dmabuf))
        )

    def why_not(self) -> str | None:
        """Why there is no GPUDirect; None where there is."""
        if not self.knows_cuda:
            return f"{self.ucx} does not move GPU memory: it is built without CUDA, or its CUDA module does not load"
        if not any(domain.component == RDMA_COMPONENT for domain in self.domains):
            return f"{self.ucx} finds no RDMA device"
        if not self.gpu_by_rdma:
            return "the GPU lets no RDMA device at its memory"
        if not self.by:
            return "no RDMA device registers GPU memory: load nvidia_peermem, or a driver and a UCX that have dmabuf"
        if not self.gpu_shows:
            return "the GPU cannot be asked to show what RDMA has written"
        return None


def why_no_gpudirect(device: int, config: TransportConfig) -> str | None:
    """Why RDMA does not reach the memory of this CUDA device, or shall not; None where it does.

    Builds the shim if it is not there yet.
    """
    if config.gpudirect == "off":
        return "gpudirect is off"
    if config.checksum:
        return "with checksums the bytes must pass a CPU"
    try:
        return examine(device, config.ucx_tls).why_not()
    except ConfigError as error:
        return error.message


def examine(device: int, tls: str = "") -> Found:
    """Look at one CUDA device and at UCX.

    Raises:
        ConfigError: there is no such device, or no UCX.
    """
    try:
        driver = Driver()
    except ConfigError as error:
        raise ConfigError("NVIDIA's driver finds no GPU on this machine", field="gpudirect") from error
    gpu = Device(driver, device)
    try:
        flushes, ordering = gpu.attribute(Attribute.RDMA_FLUSHES), gpu.attribute(Attribute.RDMA_ORDERING)
        memory = ctypes.create_string_buffer(4096)
        with gpu.current():
            context = Context(ctypes.addressof(memory), len(memory), writable=True, tls=tuning.without_peer_copies(tls))
            try:
                knows = context.moves(CUDA)
            finally:
                context.free()
            found = domains(context)
        return Found(
            f"UCX {context.library.version} ({context.library.source})",
            knows,
            found,
            gpu_by_rdma=bool(gpu.attribute(Attribute.RDMA)),
            gpu_dmabuf=bool(gpu.attribute(Attribute.DMABUF)),
            gpu_shows=bool(flushes & 1) or ordering >= OWNER,
        )
    finally:
        gpu.close()


def domains(context: Context) -> tuple[Domain, ...]:
    """The memory domains of a context's UCX."""
    buffer = ctypes.create_string_buffer(MAX_REPORT)
    context.library.calls.kvf_domains(buffer, len(buffer))
    return parse_domains(buffer.value.decode(errors="replace"))


def parse_domains(text: str) -> tuple[Domain, ...]:
    """The domains of what the shim prints, one a line; what is cut off is left out."""
    lines = [line.split(" ") for line in text.splitlines()]
    return tuple(Domain(words[0], words[1], words[2] == "1", words[3] == "1") for words in lines if len(words) == 4)
