"""What a cluster file asks of this machine: its model, its ports, its memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil

from cluster.doctor.finding import Finding
from cluster.doctor.wish import Wish
from cluster.model_store import KNOWN_MODELS, model_directory, model_is_ready, resolve_model
from cluster.plan import decode_config, planned_orders, prefill_config
from cluster.port import bound_port
from cluster.state import StateStore
from protocol.errors import CheckpointUnavailable, ConfigError, KVFerryError, StartFailed
from router.front.keys import read_keys

GIB = 1 << 30
ROOM_TO_FETCH = 1 << 30
"""Bytes of disk that the largest known model takes while it is fetched and converted."""


def judge_port(field: str, port: int, fault: str, holder: str, wish: Wish) -> Finding:
    """Whether a port is free.

    Args:
        field: of the cluster file.
        port: its value.
        fault: why it cannot be bound; "" where it can.
        holder: name of the cluster of ours that has it; "" where none does.
        wish: what shall work.
    """
    if not fault:
        return Finding(check=field, verdict="ok", said=f"{port} is free")
    if holder:
        said = f"{port} is the port of cluster {holder!r}, which is up"
        if holder == wish.config.name:
            return Finding(check=field, verdict="note", said=said)
        return Finding(check=field, verdict=wish.unmet, said=said, fix=f"kvferry down {holder}, or another {field}")
    return Finding(check=field, verdict=wish.unmet, said=fault, fix=f"another {field}; 0 takes a free one")


def judge_memory(weights: int, pools: int, available: int, wish: Wish) -> Finding:
    """Whether the weights and the KV pools of all workers, in bytes, fit into what is available."""
    needed = weights + pools
    said = (
        f"{wish.workers} workers take {weights / GIB:.1f} GiB of weights and {pools / GIB:.1f} GiB of KV pools, "
        f"{available / GIB:.1f} GiB are available"
    )
    if needed > available:
        fix = "lower engine.num_blocks or engine.pool_memory, or fewer replicas"
        return Finding(check="memory", verdict=wish.unmet, said=said, fix=fix)
    return Finding(check="memory", verdict="ok", said=said)


def examine_model(wish: Wish) -> list[Finding]:
    """Whether the model is there; fetches nothing."""
    name = wish.config.model
    try:
        if name not in KNOWN_MODELS:
            return [Finding(check="model", verdict="ok", said=f"{resolve_model(name)}")]
        if model_is_ready(name):
            return [Finding(check="model", verdict="ok", said=f"{name} is in {model_directory(name)}")]
    except CheckpointUnavailable as error:
        return [Finding(check="model", verdict=wish.unmet, said=error.message, fix="see `kvferry model list`")]
    free = shutil.disk_usage(_nearest(model_directory(name))).free
    said = f"{name} is not in the cache yet, and is fetched by the first `kvferry up`"
    if free < ROOM_TO_FETCH:
        fix = "make room, or set KVFERRY_CACHE_DIR"
        said = f"{said}; {free >> 20} MiB are free in {model_directory(name).parent}"
        return [Finding(check="model", verdict="warning", said=said, fix=fix)]
    return [Finding(check="model", verdict="note", said=said, fix=f"kvferry model get {name}")]


def examine_ports(wish: Wish) -> list[Finding]:
    """Whether the ports that are fixed can be had."""
    found = []
    for field, host, port in wish.ports:
        fault = ""
        try:
            bound_port(host, port, field)
        except StartFailed as error:
            fault = error.message.removeprefix(f"{field}: ")
        found.append(judge_port(field, port, fault, _holder(port) if fault else "", wish))
    return found or [Finding(check="router.port", verdict="ok", said="free ones are taken when the cluster comes up")]


def examine_keys(wish: Wish) -> list[Finding]:
    """Whether the file of the API keys can be read."""
    file = wish.config.router.api_keys
    if not file:
        return []
    try:
        count = len(read_keys(file))
    except ConfigError as error:
        return [
            Finding(check="router.api_keys", verdict=wish.unmet, said=error.message, fix="see `kvferry key --help`")
        ]
    return [Finding(check="router.api_keys", verdict="ok", said=f"{count} in {file}")]


def examine_memory(wish: Wish) -> list[Finding]:
    """Whether the KV pools of a cluster on this machine fit into what is available. Loads torch."""
    from engine.models.config import ModelConfig
    from engine.resolution import pool_blocks, resolve_cache_dtype, resolve_device, resolve_dtype
    from protocol.layout import KVLayout

    config = wish.config
    if not wish.here or (config.model in KNOWN_MODELS and not model_is_ready(config.model)):
        return []
    try:
        model = resolve_model(config.model)
        shape = ModelConfig.read(model)
        pools = 0
        for order in planned_orders(config):
            if order.role == "router":
                continue
            made = prefill_config if order.role == "prefill" else decode_config
            engine = made(order, model, "127.0.0.1").engine
            device = resolve_device(engine.device)
            if device.type != "cpu":
                return []
            layout = KVLayout(
                num_layers=shape.num_layers,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                block_size=engine.block_size,
                dtype=resolve_cache_dtype(engine, resolve_dtype(engine, device)),
                order=engine.order,
            )
            pools += layout.pool_bytes(pool_blocks(engine, layout, device))
    except KVFerryError as error:
        return [
            Finding(check="memory", verdict=wish.unmet, said=error.message, fix="mend the file, or the model's folder")
        ]
    weights = wish.workers * sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return [judge_memory(weights, pools, psutil.virtual_memory().available, wish)]


def _holder(port: int) -> str:
    store = StateStore()
    for name in store.names():
        state = store.load(name)
        if any(address.rpartition(":")[2] == str(port) for address in (state.url, *state.hubs)):
            return name
    return ""


def _nearest(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())
