"""The network of a private swarm: a `Network` with names derived from the swarm's key, and sealed messages.

p2pd lets anyone connect, asks for no key and tells whoever connects which protocols and topics it has. So the key is
asked for one level up, and here alone: what greets, fetches, hints and answers the DHT's calls runs unchanged above.
A request that does not prove the key ends as if the peer had gone, before anything else looks at it.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final, cast

from sapo_node.identity import Identity
from sapo_node.swarm.hivemind_light import P2PContext
from sapo_node.swarm.p2p import Network, StreamHandler
from sapo_node.swarm.p2pd import NetworkError
from sapo_node.swarm.secret import FRAME_BYTES, OVERHEAD, REQUEST_OVERHEAD, Conversation, Secret, Unproven

MAX_REQUEST_BYTES: Final = 16 * 1024
"""A sealed call of the DHT; eight records and their keys have less than 9 KiB. More is not even tried to open."""

Handler = Callable[[Any, Any], Awaitable[Any]]


async def start_network(secret: Secret | None, identity: Identity, **options: Any) -> Network:
    """`Network.start` for a swarm with a key, or for one without. `options` and errors are its own."""
    if secret is None:
        return await Network.start(identity, **options)
    network = await PrivateNetwork.start(identity, **options)
    assert isinstance(network, PrivateNetwork)
    network.secret = secret
    return network


class PrivateNetwork(Network):
    """A network among those who hold `secret`, which is set before anything is served or asked."""

    private = True
    secret: Secret

    def names(self, name: str) -> list[str]:
        return self.secret.names(name)

    @property
    def calls(self) -> "SealedCalls":
        return SealedCalls(self)

    async def open_stream(
        self, peer_id: str, protocol: str, addresses: Sequence[str] = ()
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        raw = await super().open_stream(peer_id, self.names(protocol)[0], addresses)
        return _both(_AskingStream(self, protocol, peer_id, *raw))

    async def serve_stream(self, protocol: str, handler: StreamHandler) -> None:
        async def sealed(peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await handler(peer_id, *_both(_AnsweringStream(self, protocol, peer_id, reader, writer)))

        for name in self.names(protocol):
            await super().serve_stream(name, sealed)

    async def has_openly(self, peer_id: str, protocol: str) -> bool:
        """Whether a connected peer has a protocol by its public name; nothing is sent on it. Raises NetworkError."""
        try:
            _, writer = await super().open_stream(peer_id, protocol)
        except NetworkError as error:
            if "protocols not supported" in str(error):
                return False
            raise
        writer.close()
        return True

    async def publish(self, topic: str, data: bytes) -> None:
        await super().publish(self.names(topic)[0], self.secret.seal_hint(topic, self.peer_id, data))

    async def subscribe(self, *topics: str) -> AsyncGenerator[tuple[str, bytes], None]:
        (topic,) = topics
        async with aclosing(super().subscribe(*self.names(topic))) as hints:
            async for sender, sealed in hints:
                try:
                    data = self.secret.open_hint(topic, sender, sealed)
                except Unproven:  # anyone may write to a topic, so it is neither news nor anybody's fault
                    data = b""
                yield sender, data


class _SealedStream:
    """One end of a stream that carries one request and its answer, as far as our handlers use readers and writers."""

    def __init__(
        self,
        network: PrivateNetwork,
        protocol: str,
        peer_id: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._secret, self._own, self._peer, self._protocol = network.secret, network.peer_id, peer_id, protocol
        self._reader, self._writer = reader, writer
        self._conversation: Conversation | None = None

    async def drain(self) -> None:
        await self._writer.drain()

    def close(self) -> None:
        self._writer.close()


class _AskingStream(_SealedStream):
    def write(self, data: bytes) -> None:
        """Send the request, as one."""
        assert self._conversation is None, "a stream carries one request"
        sealed, self._conversation = self._secret.ask(self._protocol, self._own, self._peer, data)
        self._writer.write(sealed)

    async def readexactly(self, size: int) -> bytes:
        """The next `size` bytes of the answer, which the other side wrote as one or in frames. Raises Unproven."""
        assert self._conversation is not None, "the request comes first"
        parts = bytearray()
        while len(parts) < size:
            frame = min(FRAME_BYTES, size - len(parts))
            parts += self._conversation.read(await self._reader.readexactly(frame + OVERHEAD))
        return bytes(parts)


class _AnsweringStream(_SealedStream):
    async def readexactly(self, size: int) -> bytes:
        """The request, as one. Raises Unproven."""
        assert self._conversation is None, "a stream carries one request"
        sealed = await self._reader.readexactly(size + REQUEST_OVERHEAD)
        data, self._conversation = self._secret.heed(self._protocol, self._peer, self._own, sealed)
        return data

    def write(self, data: bytes) -> None:
        """Send a part of the answer."""
        assert self._conversation is not None, "no answer without a request that proved the key"
        for start in range(0, len(data), FRAME_BYTES):
            self._writer.write(self._conversation.answer(data[start : start + FRAME_BYTES]))


def _both(stream: _SealedStream) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return cast(asyncio.StreamReader, stream), cast(asyncio.StreamWriter, stream)


class SealedCalls:
    """hivemind's `P2P` as far as its DHT calls and is called by it, with names and messages of a private swarm."""

    def __init__(self, network: PrivateNetwork) -> None:
        self._network = network
        self.peer_id = network.p2p.peer_id

    async def add_protobuf_handler(self, name: str, handler: Handler, request_type: Any, **_: Any) -> None:
        """Answer calls that prove the key; others get the word that peers get who are denied."""
        network = self._network

        async def answer(sealed: bytes, caller: Any) -> bytes:
            try:
                if len(sealed) > MAX_REQUEST_BYTES:
                    raise Unproven("the request is too large")
                data, conversation = network.secret.heed(name, caller.to_base58(), network.peer_id, sealed)
            except Unproven:
                raise PermissionError("denied") from None
            context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=caller)
            response = await handler(request_type.FromString(data), context)
            return conversation.answer(response.SerializeToString())

        for wire_name in network.names(name):
            await network.p2p._client.add_unary_handler(wire_name, answer)

    async def remove_protobuf_handler(self, name: str, **_: Any) -> None:
        """Stop answering."""
        for wire_name in self._network.names(name):
            await self._network.p2p._client.remove_unary_handler(wire_name)

    async def call_protobuf_handler(self, peer: Any, name: str, request: Any, response_type: Any) -> Any:
        """Call a peer. Raises Unproven for an answer without proof of the key."""
        network = self._network
        data = request.SerializeToString()
        sealed, conversation = network.secret.ask(name, network.peer_id, peer.to_base58(), data)
        answer = await network.p2p._client.call_unary_handler(peer, network.names(name)[0], sealed)
        return response_type.FromString(conversation.read(answer))
