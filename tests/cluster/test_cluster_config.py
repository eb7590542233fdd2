from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import (
    ClusterConfig,
    EngineSection,
    RaySection,
    RoleSection,
    RouterSection,
    SpeculationSection,
    TransferSection,
)
from cluster.config_file import load_config, parse_config
from cluster.demo import laptop_config
from cluster.plan import (
    ActorOrder,
    check_orders,
    decode_config,
    prefill_config,
    router_config,
    router_order,
    worker_orders,
)
from cluster.state import ClusterState, ProcessMark
from decode_worker.speculation import Speculation
from engine.config import EngineConfig
from protocol.errors import ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy"
SECRET = "the secret of this cluster"
MODEL = Path("/models/tiny")


def test_a_model_alone_is_a_whole_configuration() -> None:
    config = parse_config("model: /models/tiny")
    assert config == ClusterConfig(model="/models/tiny")
    assert config.model_name == "tiny"
    assert (config.prefill.replicas, config.decode.replicas, config.router.port) == (1, 1, 8000)


@pytest.mark.parametrize(
    ("text", "field", "said"),
    [
        ("name: x", "model", "missing"),
        ("model: ''", "model", "''"),
        ("model: 3", "model", "3"),
        ("model: m\nname: a b", "name", "'a b'"),
        ("model: m\nprefill: {replicas: 0}", "prefill.replicas", "got 0"),
        ("model: m\nprefill: {replicas: two}", "prefill.replicas", "'two'"),
        ("model: m\nprefill: 2", "prefill", "got 2"),
        ("model: m\ndecode: {threads: 0}", "decode.threads", "got 0"),
        ("model: m\ndecode: {cpus: -1}", "decode.cpus", "got -1"),
        ("model: m\ndecode: {engine: {num_blocks: many}}", "decode.engine.num_blocks", "'many'"),
        ("model: m\ndecode: {speculation: {method: 3}}", "decode.speculation.method", "3"),
        ("model: m\ndecode: {speculation: {tokens: many}}", "decode.speculation.tokens", "'many'"),
        ("model: m\ndecode: {speculation: {tokens: 3}}", "decode.speculation.method", "tokens"),
        ("model: m\nrouter: {port: 70000}", "router.port", "70000"),
        ("model: m\nrouter: {port: 9000, hub_port: 9000}", "router.hub_port", "9000"),
        ("model: m\ntransfer: {transport: 'tcp://'}", "transfer.transport", "'tcp://'"),
        ("model: m\ntransfer: {transport: pigeon}", "transfer.transport", "'pigeon'"),
        ("model: m\ntransfer: {transport: inproc}", "transfer.transport", "'inproc'"),
        ("model: m\ntransfer: {wire_dtype: fp4}", "transfer.wire_dtype", "'fp4'"),
        ("model: m\ntransfer: {lease_ttl: 0}", "transfer.lease_ttl", "got 0"),
        ("model: m\ntransfer: {link_gbit: 0}", "transfer.link_gbit", "got 0"),
        ("model: m\ntransfer: {link_gbit: fast}", "transfer.link_gbit", "'fast'"),
        ("model: m\ntransfer: {gpudirect: maybe}", "transfer.gpudirect", "'maybe'"),
        ("model: m\ntransfer: {gpudirect: 'on'}", "transfer.gpudirect", "wants transport 'ucx', got 'auto'"),
        (
            "model: m\ntransfer: {gpudirect: 'on', transport: ucx, checksum: true}",
            *("transfer.gpudirect", "wants checksum false"),
        ),
        (
            "model: m\ntransfer: {gpudirect: 'on', transport: ucx, wire_dtype: float16}",
            *("transfer.gpudirect", "wants wire_dtype null"),
        ),
        ("model: m\nengine: {cuda_graph_batches: [1, two]}", "engine.cuda_graph_batches", "'two'"),
        ("model: m\nray: {object_store_memory: 1}", "ray.object_store_memory", "got 1"),
        ("model: m\nray: {start_timeout: .nan}", "ray.start_timeout", "nan"),
        ("model: m\nprefill: {limits: {max_waiting: [1]}}", "prefill.limits", "[1]"),
    ],
)
def test_an_error_names_the_path_and_the_value(text: str, field: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text)
    assert caught.value.field == field
    assert field in caught.value.message
    assert said in caught.value.message


def test_on_and_off_are_words_where_they_are_choices() -> None:
    config = parse_config("model: m\ntransfer: {gpudirect: on, transport: ucx}\nengine: {cuda_graphs: off}")
    assert (config.transfer.gpudirect, config.engine.cuda_graphs) == ("on", "off")
    assert parse_config("model: m\ntransfer: {gpudirect: off, checksum: on}").transfer.checksum is True
    for text, said in (("name: off", "False"), ("engine: {cuda_graphs: on}", "True")):
        with pytest.raises(ConfigError, match=said):
            parse_config(f"model: m\n{text}")
    assert parse_config("model: m\nengine: {cuda_graph_batches: [1, 8]}").engine.cuda_graph_batches == (1, 8)


@pytest.mark.parametrize(
    ("text", "field", "nearest"),
    [
        ("model: m\nengin: {}", "engin", "'engine'"),
        ("model: m\nengine: {block_sise: 8}", "engine.block_sise", "'block_size'"),
        ("model: m\nprefill: {replica: 2}", "prefill.replica", "'replicas'"),
        ("model: m\ndecode: {engine: {max_sequence: 2}}", "decode.engine.max_sequence", "'max_sequences'"),
        ("model: m\ndecode: {speculation: {token: 4}}", "decode.speculation.token", "'tokens'"),
        ("model: m\nray: {adress: auto}", "ray.adress", "'address'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(text: str, field: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match="did you mean") as caught:
        parse_config(text)
    assert caught.value.field == field
    assert nearest in caught.value.message


def test_a_key_like_no_other_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"known keys: .*hub_port") as caught:
        parse_config("model: m\nrouter: {zzzzzz: 1}")
    assert caught.value.field == "router.zzzzzz"


@pytest.mark.parametrize("text", ["", "[]", "3", "a: [", "model: !!python/object/apply:os.getcwd []"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="configuration"):
        parse_config(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from(["name", "model", "served_name", "engine", "prefill", "router", "transfer", "ray"]),
)
def test_any_value_gives_a_configuration_or_a_config_error(value: object, key: str) -> None:
    import yaml

    text = yaml.safe_dump({"model": "m"} | {key: value})
    refused: ConfigError | None = None
    try:
        parse_config(text)
    except ConfigError as error:
        refused = error
    assert refused is None or (refused.field or "").split(".")[0] == key


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: RoleSection(replicas=0), "replicas"),
        (lambda: RouterSection(port=-1), "port"),
        (lambda: TransferSection(streams=0), "streams"),
        (lambda: TransferSection(layers_per_ship=-1), "layers_per_ship"),
        (lambda: RaySection(cpus=0), "cpus"),
        (lambda: ClusterConfig(model=" "), "model"),
    ],
)
def test_construction_validates_too(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.field == field


def test_the_engine_section_has_the_fields_of_the_engine() -> None:
    section = {field.name for field in msgspec.structs.fields(EngineSection)}
    assert section == {*EngineConfig.__dataclass_fields__} - {"model", "threads"}


def test_the_speculation_section_has_the_settings_of_speculation() -> None:
    section = {field.name for field in msgspec.structs.fields(SpeculationSection)}
    assert section == {*Speculation.__dataclass_fields__}


@pytest.mark.parametrize(
    ("text", "speculation"),
    [
        ("", None),
        ("decode: {speculation: {}}", None),
        ("decode: {speculation: {method: null}}", None),
        ("decode: {speculation: {method: ngram}}", Speculation()),
        (
            "decode: {speculation: {method: ngram, tokens: 6, min_match: 1, max_match: 3}}",
            Speculation(tokens=6, min_match=1, max_match=3),
        ),
    ],
)
def test_decode_workers_are_told_how_to_speculate(text: str, speculation: Speculation | None) -> None:
    order = worker_orders(parse_config(f"model: m\n{text}"), ("tcp://h:1",))[1]
    back = msgspec.json.decode(msgspec.json.encode(order), type=ActorOrder)
    assert decode_config(back, MODEL, "h").speculation == speculation


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_a_relative_model_is_taken_from_the_files_folder(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    file = tmp_path / "c.yaml"
    file.write_text("model: ./weights\n")
    assert load_config(file).model == str((tmp_path / "weights").resolve())
    file.write_text("model: smollm2-135m\n")
    assert load_config(file).model == "smollm2-135m"


def test_the_file_of_keys_is_taken_from_the_files_folder(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nrouter: {api_keys: keys.yaml}\n")
    assert load_config(file).router.api_keys == str((tmp_path / "keys.yaml").resolve())
    file.write_text("model: m\nrouter: {api_keys: /etc/keys.yaml}\n")
    assert load_config(file).router.api_keys == "/etc/keys.yaml"
    file.write_text("model: m\nrouter: {tls_certificate: router.pem, tls_key: /etc/router.key}\n")
    router = load_config(file).router
    assert (router.tls_certificate, router.tls_key) == (str((tmp_path / "router.pem").resolve()), "/etc/router.key")


def test_the_file_says_which_prompts_stay_on_decode_workers() -> None:
    text = "model: m\nrouter: {local_prefill: short, local_prefill_tokens: 64}\n"
    text += "decode: {limits: {local_prefill: false, step_tokens: 96}}"
    config = parse_config(text)
    router = router_config(router_order(config, 1, 2), Path("/models/m"), "127.0.0.1")
    assert (router.local_prefill, router.local_prefill_tokens) == ("short", 64)
    (order,) = (order for order in worker_orders(config, ("tcp://127.0.0.1:2",)) if order.role == "decode")
    decode = decode_config(order, Path("/models/m"), "127.0.0.1")
    assert (decode.local_prefill, decode.step_tokens) == (False, 96)
    with pytest.raises(ConfigError, match=r"router\.local_prefill"):
        parse_config("model: m\nrouter: {local_prefill: sometimes}")


def test_the_format_of_tools_reaches_the_router() -> None:
    order = router_order(parse_config("model: m\nrouter: {tool_format: llama3_json}"), 1, 2)
    assert router_config(order, Path("/models/m"), "127.0.0.1").tool_format == "llama3_json"
    with pytest.raises(ConfigError, match=r"router\.tool_format"):
        parse_config("model: m\nrouter: {tool_format: xml}")


def test_a_file_error_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nprefill: {replicas: 0}\n")
    with pytest.raises(ConfigError, match=r"c\.yaml: prefill\.replicas") as caught:
        load_config(file)
    assert caught.value.field == "prefill.replicas"


def test_the_demo_is_what_the_laptop_file_says() -> None:
    assert load_config(DEPLOY / "laptop.yaml") == laptop_config()


@pytest.mark.parametrize(("file", "workers"), [("laptop.yaml", (1, 1)), ("laptop-2p2d.yaml", (2, 2))])
def test_the_shipped_files_make_every_components_configuration(file: str, workers: tuple[int, int]) -> None:
    config = load_config(DEPLOY / file)
    assert (config.prefill.replicas, config.decode.replicas) == workers
    orders = [router_order(config, 8000, 7000), *worker_orders(config, ("tcp://127.0.0.1:7000",))]
    assert len({order.name for order in orders}) == 1 + sum(workers)
    check_orders(orders, MODEL)


def test_a_secret_is_in_no_text_that_might_be_logged() -> None:
    orders = worker_orders(parse_config("model: m"), ("tcp://h:1",), SECRET)
    router = router_order(parse_config("model: m"), 80, 81, SECRET)
    told = [*orders, prefill_config(orders[0], MODEL, "h"), decode_config(orders[1], MODEL, "h")]
    told += [router, router_config(router, MODEL, "h")]
    state = ClusterState(name="one", starter=ProcessMark(pid=1, created=0.0), created=0.0, secret=SECRET)
    assert not [each for each in (*told, state) if SECRET in f"{each!r} {each}"]
    back = msgspec.json.decode(msgspec.json.encode(orders[0]), type=ActorOrder)
    assert (back, back.secret) == (orders[0], SECRET)


def test_a_role_may_say_its_pool_the_other_way() -> None:
    config = parse_config(
        "model: m\nengine: {num_blocks: 64}\nprefill: {engine: {pool_memory: 1GiB}}\ndecode: {engine: {dtype: float32}}"
    )
    prefill_order, decode_order = (
        order for order in worker_orders(config, ("tcp://h:1",), SECRET) if order.role != "router"
    )
    assert prefill_config(prefill_order, MODEL, "h").engine.pool_memory == "1GiB"
    assert decode_config(decode_order, MODEL, "h").engine.num_blocks == 64
    both = parse_config("model: m\nengine: {num_blocks: 64, pool_memory: 40%}")
    with pytest.raises(ConfigError, match="num_blocks 64 and pool_memory '40%'"):
        prefill_config(worker_orders(both, ("tcp://h:1",), SECRET)[0], MODEL, "h")


def test_a_role_overrides_the_shared_engine() -> None:
    config = parse_config(
        "model: m\nengine: {num_blocks: 64, block_size: 8}\n"
        "transfer: {streams: 3, timeout: 4, transport: tcp, checksum: true, link_gbit: 25,"
        " layers_per_ship: 9, wire_dtype: float8_e4m3}\n"
        "prefill: {engine: {num_blocks: 32}, threads: 3, limits: {max_waiting: 7, staging_bytes: 1048576}}\n"
        "decode: {engine: {block_size: 32, order: HND, dtype: float32}}\n"
        "router: {limits: {max_attempts: 9}}"
    )
    orders = {order.name: order for order in worker_orders(config, ("tcp://h:1",), SECRET)}
    prefill = prefill_config(orders["prefill-0"], MODEL, "10.0.0.1")
    assert (prefill.engine.num_blocks, prefill.engine.block_size, prefill.engine.threads) == (32, 8, 3)
    assert (prefill.max_waiting, prefill.streams, prefill.transfer_timeout, prefill.transport) == (7, 3, 4, "tcp")
    assert (prefill.name, prefill.model_name, prefill.routers) == ("prefill-0", "m", ("tcp://h:1",))
    assert (prefill.bind_host, prefill.layers_per_ship) == ("10.0.0.1", 9)
    decode = decode_config(orders["decode-0"], MODEL, "10.0.0.1")
    assert (prefill.staging_bytes, decode.wire_dtype) == (1 << 20, "float8_e4m3")
    assert (decode.engine.block_size, decode.engine.order, decode.engine.dtype) == (32, "HND", "float32")
    assert (decode.engine.num_blocks, decode.transport, decode.transfer_timeout) == (64, "tcp", 4)
    for worker in (prefill, decode):
        assert (worker.transfer_checksum, worker.secret, worker.link_gbit) == (True, SECRET, 25.0)
    router = router_config(router_order(config, 80, 81, SECRET), MODEL, "10.0.0.1")
    assert router.secret == SECRET
    assert (router.port, router.hub, router.max_attempts) == (80, "tcp://10.0.0.1:81", 9)
    assert orders["prefill-0"].environment() == {"OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("model: m\nengine: {dtype: float8}", "engine.dtype"),
        ("model: m\ndecode: {engine: {order: XYZ}}", "engine.order"),
        ("model: m\nprefill: {limits: {max_wait: 1}}", "prefill.limits.max_wait"),
        ("model: m\nprefill: {limits: {name: x}}", "prefill.limits.name"),
        ("model: m\ndecode: {limits: {max_waiting: 0}}", "decode.max_waiting"),
        ("model: m\nprefill: {limits: {staging_bytes: 1}}", "prefill.staging_bytes"),
        ("model: m\nrouter: {limits: {policy: best}}", "router.policy"),
        ("model: m\ndecode: {speculation: {method: medusa}}", "decode.speculation.method"),
        ("model: m\ndecode: {speculation: {method: ngram, tokens: 0}}", "decode.speculation.tokens"),
        ("model: m\ndecode: {speculation: {method: ngram, max_match: 1}}", "decode.speculation.max_match"),
        ("model: m\ndecode: {limits: {speculation: 1}}", "decode.limits.speculation"),
    ],
)
def test_a_components_own_complaint_shows_before_anything_starts(text: str, field: str) -> None:
    config = parse_config(text)
    orders = [router_order(config, 8000, 7000), *worker_orders(config, ("tcp://127.0.0.1:7000",))]
    with pytest.raises(ConfigError) as caught:
        check_orders(orders, MODEL)
    assert caught.value.field == field
    assert field.rpartition(".")[2] in caught.value.message
