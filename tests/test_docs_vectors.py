"""docs/protocol.md and docs/algorithm.md against the code: test vector, tables, names of code and settings."""

import ast
import asyncio
import hashlib
import hmac
import inspect
import re
import textwrap
from pathlib import Path

import base58
import msgspec
import pytest
import uvloop
import zstandard
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from sapo_node.config import NodeConfig
from sapo_node.identity import Identity
from sapo_node.rollouts import codec, schema
from sapo_node.rollouts.schema import Announcement, Batch, Completion, Group, Listing, ModelCard, TaskRef
from sapo_node.rollouts.verify import Reason
from sapo_node.swarm import protocol, records
from sapo_node.swarm.dht import SwarmDHT, node_id_of
from sapo_node.swarm.hivemind_light import PeerID, dht_pb2, p2pd_pb2
from sapo_node.swarm.p2pd import read_message
from sapo_node.swarm.secret import Secret
from sapo_node.tasks import reasoning_gym
from sapo_node.tasks.base import TaskSpec, config_hash, is_eval_question, question_sha256
from sapo_node.tasks.scoring import eval_seed
from tests.swarm.conftest import Loopback

DOC = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text()

SWARM, NAME, VERSION, EPOCH, INDEX, K = "example", "basic_arithmetic", "0.1.25", 59_000_000, 1, 2
CONFIG: dict[str, schema.ConfigValue] = {"max_terms": 2, "min_terms": 2, "operators": ["+", "-"]}
ME = Identity(Path("none"), Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
SEED = protocol.question_seed(SWARM, ME.public_key, EPOCH, NAME, config_hash(CONFIG), INDEX)
PREFIX = records.shard_prefix(ME.public_key, EPOCH, K)


def documented(kind: str = "vector") -> dict[str, str]:
    """The lines `name = value` of a vector; further lines of a value are indented."""
    [block] = re.findall(rf"```{kind}\n(.*?)```", DOC, re.DOTALL)
    joined = re.sub(r"\n +", "", block)
    return dict(line.split(" = ", 1) for line in joined.splitlines())


def the_batch(question_digest: bytes) -> Batch:
    ref = TaskRef(
        source="reasoning_gym",
        version=VERSION,
        name=NAME,
        config_hash=config_hash(CONFIG),
        config=CONFIG,
        epoch=EPOCH,
        index=INDEX,
    )
    group = Group(
        task=ref,
        question_sha256=question_digest,
        completions=[
            Completion(text="<answer>-3110</answer>", finish="stop", n_tokens=9),
            Completion(text="It is -3111, or", finish="length", n_tokens=8),
        ],
        sampled_at=1770000010.25,
        policy_version=7,
    )
    card = ModelCard(name="demo", params=547_000, licence="apache-2.0", tokenizer_sha256=bytes(range(32, 64)))
    return Batch(
        proto=protocol.PROTO,
        swarm=SWARM,
        peer_id=ME.peer_id,
        seq=1,
        created_at=1770000012.5,
        model=card,
        groups=[group],
    )


def the_announcement(envelope: bytes) -> Announcement:
    listing = Listing(content_id=codec.content_id_of(envelope), size=len(envelope), groups=1, created_at=1770000012.5)
    return Announcement(
        proto=protocol.PROTO,
        swarm=SWARM,
        epoch=EPOCH,
        k=K,
        prefix=PREFIX,
        seq=1770000013000,
        created_at=1770000013.0,
        version="0.1.0",
        roles=["trainer"],
        addresses=["/ip4/127.0.0.1/tcp/4001"],
        batches=[listing],
    )


def computed(envelope: bytes) -> dict[str, str]:
    """The vector by the code. The envelope is given, since other zstd versions may compress to other bytes."""
    question = reasoning_gym.item(NAME, CONFIG, SEED)["question"]
    batch = the_batch(question_sha256(question))
    record = codec.encode_announcement(the_announcement(envelope), ME)
    spec = TaskSpec(source="reasoning_gym", name=NAME, version=VERSION, config=CONFIG)
    place = (SWARM, EPOCH, K, PREFIX)
    return {
        "key_seed": bytes(range(32)).hex(),
        "key_file": ME._file_content().hex(),
        "public_key": ME.public_key.hex(),
        "peer_id": ME.peer_id,
        "dht_node_id": node_id_of(PeerID.from_base58(ME.peer_id)).to_bytes().hex(),
        "config_hash": config_hash(CONFIG).hex(),
        "question_seed": str(SEED),
        "question": question,
        "question_sha256": question_sha256(question).hex(),
        "first_eval_seeds": " ".join(str(eval_seed(spec, i)) for i in range(3)),
        "batch_msgpack": msgspec.msgpack.encode(batch).hex(),
        "batch_content_id": codec.content_id_of(envelope).hex(),
        "batch_envelope": envelope.hex(),
        "shard_prefix": str(PREFIX),
        "dht_key": records.record_key(*place),
        "dht_key_id": records.key_id(*place).hex(),
        "announcement_content_id": codec.content_id_of(record).hex(),
        "announcement_envelope": record.hex(),
    }


def as_block(values: dict[str, str]) -> str:
    """The vector as the document writes it."""
    lines = [textwrap.fill(f"{name} = {value}", 112, subsequent_indent="    ") for name, value in values.items()]
    return "\n".join(lines)


def test_the_vector_is_what_the_code_computes() -> None:
    found = documented()
    assert found == computed(bytes.fromhex(found["batch_envelope"]))


def test_the_vectors_question_may_be_trained_on() -> None:
    assert not is_eval_question(bytes.fromhex(documented()["question_sha256"]))


def test_the_vectors_envelope_opens_to_its_batch() -> None:
    found = documented()
    opened = codec.open_batch(bytes.fromhex(found["batch_envelope"]), SWARM)
    assert opened.batch == the_batch(bytes.fromhex(found["question_sha256"]))
    assert opened.content_id.hex() == found["batch_content_id"]


def test_the_envelope_is_laid_out_and_signed_as_described() -> None:
    """By the document's words alone, without our codec."""
    found = documented()
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(found["key_seed"]))
    for kind, tag in (("batch", b"sapo-batch/1\0"), ("announcement", b"sapo-announcement/1\0")):
        envelope = bytes.fromhex(found[f"{kind}_envelope"])
        payload = envelope[102:]
        content_id = hashlib.sha256(payload).digest()
        signature = key.sign(tag + len(SWARM).to_bytes(4, "big") + SWARM.encode() + content_id)
        head = b"SAPO\x01" + kind[:1].upper().encode() + bytes.fromhex(found["public_key"])
        assert envelope[:102] == head + signature
    packed = zstandard.decompress(bytes.fromhex(found["batch_envelope"])[102:])
    assert packed.hex() == found["batch_msgpack"]


def test_identities_are_derived_as_described() -> None:
    found = documented()
    public_key = bytes.fromhex(found["public_key"])
    peer_id = bytes.fromhex("002408011220") + public_key
    assert found["key_file"] == "08011240" + found["key_seed"] + found["public_key"]
    assert base58.b58encode(peer_id).decode() == found["peer_id"]
    assert hashlib.sha1(peer_id).hexdigest() == found["dht_node_id"]


THEM = Identity(Path("none"), Ed25519PrivateKey.from_private_bytes(bytes(range(0x20, 0x40))))
SWARM_KEY = bytes(range(0x40, 0x60))
ASKED_AT = 1_770_000_000.0


def private_computed() -> dict[str, str]:
    """The vector of a private swarm by the document's words, without our code for it."""

    def mac(key: bytes, data: bytes) -> bytes:
        return hmac.digest(key, data, "sha256")

    root = mac(mac(b"sapo/1/private", SWARM_KEY), SWARM.encode() + b"\x01")  # RFC 5869, one block

    def key(*parts: str | bytes) -> bytes:
        lengths = ((part if isinstance(part, bytes) else part.encode()) for part in parts)
        info = hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in lengths)).digest()
        return mac(root, info + b"\x01")

    def sealed(k: bytes, nonce: bytes, data: bytes) -> str:
        return (nonce + ChaCha20Poly1305(k).encrypt(nonce, data, None)).hex()

    def name(public: str) -> str:
        return "/" + key("name", public)[:16].hex()

    peers = (protocol.FETCH_PROTOCOL, ME.peer_id, THEM.peer_id)
    question = bytes.fromhex(documented()["batch_content_id"])
    dht_key = name(f"sapo/1/{SWARM}/{EPOCH}/{K}/{PREFIX}")
    topic = f"sapo/1/{SWARM}"
    return {
        "root": root.hex(),
        "hello_protocol": name("/sapo/hello"),
        "fetch_protocol": name(protocol.FETCH_PROTOCOL),
        "rpc_find": name("DHTProtocol.rpc_find"),
        "topic": name(topic),
        "private_dht_key": dht_key,
        "private_dht_key_id": hashlib.sha1(msgspec.msgpack.encode(dht_key)).hexdigest(),
        "rendezvous_cid": "01551220" + hashlib.sha256(name(f"sapo/1/rendezvous/{SWARM}").encode()).hexdigest(),
        "asked_peer_id": THEM.peer_id,
        "request": sealed(key("request", *peers), b"\x11" * 12, int(ASKED_AT * 1000).to_bytes(8, "big") + question),
        "answer_0": sealed(key("answer", *peers, b"\x11" * 12, bytes(4)), b"\x22" * 12, b"yes"),
        "hint": sealed(key("hint", topic, ME.peer_id), b"\x33" * 12, b"news"),
    }


def test_the_vector_of_a_private_swarm_follows_from_the_document() -> None:
    assert documented("private") == private_computed()


def test_the_code_of_a_private_swarm_opens_and_names_what_the_vector_holds() -> None:
    found = documented("private")
    secret = Secret([SWARM_KEY], SWARM, lambda: ASKED_AT)
    peers = (protocol.FETCH_PROTOCOL, ME.peer_id, THEM.peer_id)
    data, answering = secret.heed(*peers, bytes.fromhex(found["request"]))
    assert data.hex() == documented()["batch_content_id"]
    answering.count = 0
    assert answering.read(bytes.fromhex(found["answer_0"])) == b"yes"
    topic = protocol.hint_topic(SWARM)
    assert secret.open_hint(topic, ME.peer_id, bytes.fromhex(found["hint"])) == b"news"
    named = [protocol.HELLO_PROTOCOL, protocol.FETCH_PROTOCOL, "DHTProtocol.rpc_find", topic]
    assert [secret.names(name) for name in named] == [
        [found[field]] for field in ("hello_protocol", "fetch_protocol", "rpc_find", "topic")
    ]
    place = (SWARM, EPOCH, K, PREFIX)
    assert [key.hex() for key in records.key_ids(secret.names, *place)] == [found["private_dht_key_id"]]
    (rendezvous,) = secret.names(protocol.rendezvous_name(SWARM))
    assert protocol.content_cid(rendezvous).hex() == found["rendezvous_cid"]


def test_every_constant_of_the_protocol_has_a_row_with_its_value() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| `(.+?)` \|", DOC, re.MULTILINE))
    constants = {name: value for name, value in vars(protocol).items() if name.isupper() and not name.startswith("_")}
    assert rows == {name: shown(value) for name, value in constants.items()}


def shown(value: object) -> str:
    if isinstance(value, bytes):
        return value.decode().replace("\0", r"\0")
    return str(value)


@pytest.mark.parametrize(
    "struct",
    [c for _, c in inspect.getmembers(schema, inspect.isclass) if c.__module__ == schema.__name__],
    ids=lambda c: c.__name__,
)
def test_every_field_of_a_struct_is_listed_in_order(struct: type[msgspec.Struct]) -> None:
    form = "array" if struct.__struct_config__.array_like else "map"
    section = DOC.split(f"#### {struct.__name__} ({form})\n")[1].split("\n#")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == struct.__struct_fields__


def test_every_reason_of_the_verification_is_listed_with_its_outcome() -> None:
    rows = re.findall(r"^\| (accept|ignore|reject) \| ([a-z ]+) \|", DOC, re.MULTILINE)
    assert rows == [(reason.outcome, reason.value) for reason in Reason]


def test_a_dht_call_made_by_hand_is_answered(tmp_path: Path) -> None:
    """The frames of a unary call as the document describes them, over a plain stream."""
    uvloop.run(ping_by_hand(tmp_path))


async def ping_by_hand(folder: Path) -> None:
    async with Loopback(folder) as loopback:
        holder, caller = await loopback.start("holder"), await loopback.start("caller")
        dht = await SwarmDHT.start(holder, SWARM)
        loopback.stack.push_async_callback(dht.close)
        await caller.connect(await loopback.address_of(holder))
        reader, writer = await caller.open_stream(holder.peer_id, "DHTProtocol.rpc_ping")
        ping = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo()).SerializeToString()
        call = p2pd_pb2.PersistentConnectionRequest(
            callId=bytes(range(16)),
            callUnary=p2pd_pb2.CallUnaryRequest(peer=b"", proto="DHTProtocol.rpc_ping", data=ping),
        ).SerializeToString()
        assert len(call) < 128  # so its length is one byte of a varint
        writer.write(bytes([len(call)]) + call)
        async with asyncio.timeout(5):
            answer = p2pd_pb2.PersistentConnectionRequest.FromString(await read_message(reader, 4096))
        writer.close()
        assert answer.callId == bytes(range(16))
        pong = dht_pb2.PingResponse.FromString(answer.unaryResponse.response)
        assert pong.peer.node_id == hashlib.sha1(base58.b58decode(holder.peer_id)).digest()


# docs/algorithm.md and docs/protocol.md name code and settings, which must exist.

DOCS = Path(__file__).parent.parent / "docs"
TEXTS = {name: (DOCS / name).read_text() for name in ("algorithm.md", "protocol.md")}


def test_the_code_that_the_algorithm_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", TEXTS["algorithm.md"])
    assert len(named) > 15
    for path, name in named:
        node: ast.AST = ast.parse((DOCS.parent / "sapo_node" / path).read_text())  # not imported: torch takes seconds
        for part in name.split("."):
            definitions = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            inside = {d.name: d for d in ast.iter_child_nodes(node) if isinstance(d, definitions)}
            assert part in inside, f"{path}: {name}"
            node = inside[part]


@pytest.mark.parametrize("name", TEXTS)
def test_the_files_that_a_document_names_exist(name: str) -> None:
    for path in re.findall(r"`((?:sapo_node|tests|configs)/[\w/]*(?:\.\w+)?)`", TEXTS[name]):
        assert (DOCS.parent / path).exists(), path


def test_the_settings_that_the_algorithm_names_exist() -> None:
    sections = NodeConfig().dump()
    named = re.findall(r"\b(training|inference|rollouts|swarm|tasks)\.(\w+)(?!\w*[/(:]\w*\.py)", TEXTS["algorithm.md"])
    settings = [(section, field) for section, field in named if field != "py"]
    assert len(settings) > 20
    assert [pair for pair in settings if pair[1] not in sections[pair[0]]] == []


def test_the_selection_example_is_right() -> None:
    p, completions = 0.02, 8
    survivors = (p - p**completions) / (1 - p**completions - (1 - p) ** completions)
    assert f"is {survivors:.3f}: more than six times p" in TEXTS["algorithm.md"]
