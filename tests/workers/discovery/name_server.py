"""A name server over UDP and TCP that knows what a test has it know, and fails on demand."""

import asyncio
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rrset
from dns.resolver import Resolver


@dataclass(slots=True)
class NameServer:
    """records: `name type` -> what it has, as text. extra: sent along with each answer."""

    at: tuple[str, int]
    records: dict[str, list[str]] = field(default_factory=dict)
    extra: dict[str, list[str]] = field(default_factory=dict)
    rcode: dns.rcode.Rcode | None = None
    """What it answers with instead."""
    is_silent: bool = False
    asked: list[str] = field(default_factory=list)
    """`protocol name type` of each question."""

    def resolver(self):
        resolver = Resolver(configure=False)
        resolver.nameservers, resolver.port = [self.at[0]], self.at[1]
        return resolver

    def answer(self, protocol, asked):
        query = dns.message.from_wire(asked)
        question = query.question[0]
        name, kind = question.name.to_text(), question.rdtype.name
        self.asked.append(f"{protocol} {name} {kind}")
        if self.is_silent:
            return None
        reply = dns.message.make_response(query)
        names = {known.split()[0] for known in self.records}
        if self.rcode is not None or name not in names:
            reply.set_rcode(dns.rcode.NXDOMAIN if self.rcode is None else self.rcode)
            return reply.to_wire()
        if found := self.records.get(f"{name} {kind}"):
            reply.answer.append(dns.rrset.from_text_list(name, 0, "IN", kind, found))
            for known, told in self.extra.items():
                of, _, its_kind = known.partition(" ")
                reply.additional.append(dns.rrset.from_text_list(of, 0, "IN", its_kind, told))
        size = 65535 if protocol == "tcp" else max(512, query.payload)
        try:
            return reply.to_wire(max_size=size)
        except dns.exception.TooBig:
            reply.answer.clear()
            reply.additional.clear()
            reply.flags |= dns.flags.TC
            return reply.to_wire()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server):
        self._server = server

    def connection_made(self, transport):
        self._transport = transport

    def datagram_received(self, data, addr):
        if answer := self._server.answer("udp", data):
            self._transport.sendto(answer, addr)


@asynccontextmanager
async def name_server(host="127.0.0.1", port=0):
    async def serve(reader, writer):
        (size,) = struct.unpack("!H", await reader.readexactly(2))
        if answer := server.answer("tcp", await reader.readexactly(size)):
            writer.write(struct.pack("!H", len(answer)) + answer)
            await writer.drain()
        writer.close()

    tcp = await asyncio.start_server(serve, host, port, family=socket.AF_INET)
    server = NameServer(tcp.sockets[0].getsockname())
    loop = asyncio.get_running_loop()
    udp, _ = await loop.create_datagram_endpoint(lambda: _Udp(server), local_addr=server.at)
    async with tcp:
        try:
            yield server
        finally:
            udp.close()
