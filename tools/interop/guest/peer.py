#!/usr/bin/python3
"""A verbs peer that others drive: rdma_rxe's queue pairs and memory by JSON lines over TCP.

One connection at a time; each line that comes is a command, each line that goes back its answer, in order: {"ok": true,
...}, or {"error": WHY}. Objects are named by small integers. With the connection end all of its objects.

  {"do": "info"}                                      -> gids, by index; kernel
  {"do": "memory", "length": N, "access": A}          -> id, addr, rkey        (A: bits of ibv_access_flags; default all)
  {"do": "fill", "memory": M, "parts": [[OFFSET, LENGTH, SEED], ...]}          parts as the pattern, all else UNTOUCHED
  {"do": "check", as fill, "ms": T}                   -> wrong: the first byte that is not as filled, or null; looks again
                                                         until it is, or T ms have passed. SEED null: anything may be there
  {"do": "peek", "memory": M, "offset": O, "length": N} -> hex;    {"do": "poke", "memory": M, "offset": O, "hex": H}
  {"do": "queue_pair", "kind": "rc|uc|ud", "srq": S}  -> id, qpn              (srq: receives are the SRQ's; may be absent)
  {"do": "connect", "qp": Q, "gid": G, "sgid_index": I, "qpn": N, "mtu": BYTES, "sq_psn": P, "rq_psn": P, "access": A,
   "timeout": 18, "retry": 7, "rnr_retry": 7, "rnr_timer": 12, "traffic_class": 0, "flow_label": 0}      (to RTS)
  {"do": "srq"}                                       -> id
  {"do": "join", "qp": Q, "group": ADDRESS}              (a UD queue pair takes what is sent to a multicast group)
  {"do": "receive", "qp": Q, "memory": M, "parts": [[OFFSET, LENGTH], ...]}                       (or of an SRQ, as qp)
  {"do": "send", "qp": Q, "op": OP, "memory": M, "parts": [{"offset": O, "length": N, "addr": A, "rkey": K, "imm": I,
   "compare": C, "swap": S, "invalidate": K, "fence": false}, ...]}    OP: a key of OPERATIONS
                                                          (ud: "to": {"gid", "sgid_index", "qpn", "traffic_class"} beside)
  {"do": "window", "qp": Q, "memory": M, "offset": O, "length": N, "access": A} -> id, rkey    (type 2, bound and complete)
  {"do": "poll", "qp": Q, "queue": "send|receive", "count": N, "ms": T} -> completions, with wr_id, status, opcode, length,
                                                         imm, invalidated: N of them, or what there is after T ms
  {"do": "state", "qp": Q}                            -> state: the verbs' number
  {"do": "destroy", "id": N};    {"do": "release"}       one object; all
  {"do": "all", "commands": [COMMAND, ...]}           -> answers, of each; it ends with the first that fails

Work requests are numbered from 0 for each queue of a queue pair, and for each SRQ.
"""
import ctypes
import json
import os
import socket
import sys
import time

import pyverbs.enums as v
from pyverbs.addr import AH, AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR, MW, MWBindInfo
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import RecvWR, SendWR, SGE

PORT = 18600
UNTOUCHED = 0xFE                      # what no pattern holds
PERIOD = 251                          # a prime: a packet in another's place shows
EVERYTHING = (v.IBV_ACCESS_LOCAL_WRITE | v.IBV_ACCESS_REMOTE_WRITE | v.IBV_ACCESS_REMOTE_READ
              | v.IBV_ACCESS_REMOTE_ATOMIC | v.IBV_ACCESS_MW_BIND)
FOR_QP = EVERYTHING & ~v.IBV_ACCESS_MW_BIND
KINDS = {"rc": v.IBV_QPT_RC, "uc": v.IBV_QPT_UC, "ud": v.IBV_QPT_UD}
OPERATIONS = {
    "send": v.IBV_WR_SEND, "send_imm": v.IBV_WR_SEND_WITH_IMM, "send_inv": v.IBV_WR_SEND_WITH_INV,
    "write": v.IBV_WR_RDMA_WRITE, "write_imm": v.IBV_WR_RDMA_WRITE_WITH_IMM, "read": v.IBV_WR_RDMA_READ,
    "compare_swap": v.IBV_WR_ATOMIC_CMP_AND_SWP, "fetch_add": v.IBV_WR_ATOMIC_FETCH_AND_ADD,
}
MTUS = {256: v.IBV_MTU_256, 512: v.IBV_MTU_512, 1024: v.IBV_MTU_1024, 2048: v.IBV_MTU_2048, 4096: v.IBV_MTU_4096}
# rxe writes the kernel's number of the flag into completions of user space, which is not the verbs'.
INVALIDATED = v.IBV_WC_WITH_INV | 4
QKEY = 0x11111111
DEPTH = 128

REVOLUTION = bytes(range(PERIOD)) * 2


def pattern(length, seed):
    start = seed % PERIOD
    return (REVOLUTION[start:start + PERIOD] * (length // PERIOD + 1))[:length]


class QueuePair:
    def __init__(self, peer, kind, srq=None):
        self.kind = kind
        self.queues = {"send": CQ(peer.context, 2 * DEPTH), "receive": CQ(peer.context, 2 * DEPTH)}
        cap = QPCap(max_send_wr=DEPTH, max_recv_wr=DEPTH, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=KINDS[kind], scq=self.queues["send"], rcq=self.queues["receive"], cap=cap,
                          srq=srq and srq.srq, sq_sig_all=1)
        self.qp = QP(peer.pd, init)
        self.sent = self.received = 0
        # rxe looks an address handle up when it sends, so it lives as long as the queue pair.
        self.address_handles = []
        self.memberships = []

    def join(self, group):
        """pyverbs has no call for it, so libibverbs is asked, by the address of the queue pair that pyverbs holds."""
        libibverbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
        raw = socket.inet_pton(socket.AF_INET, group)
        gid = bytes(10) + b"\xff\xff" + raw
        if libibverbs.ibv_attach_mcast(ctypes.c_void_p(self.address()), gid, 0):
            raise OSError(ctypes.get_errno(), "ibv_attach_mcast")
        # The card hears the group, and the kernel does not turn away what comes for it.
        membership = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        index = socket.if_nametoindex("eth0")
        membership.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, raw + bytes(4) + index.to_bytes(4, sys.byteorder))
        self.memberships.append((libibverbs, gid, membership))

    def address(self):
        """Of the `struct ibv_qp`: its queue pair number is at 52. Read as a file, for a word may be no address."""
        with open("/proc/self/mem", "rb", 0) as memory:
            words = ctypes.string_at(id(self.qp), sys.getsizeof(self.qp))
            for at in range(16, len(words) - 7, 8):
                candidate = int.from_bytes(words[at:at + 8], sys.byteorder)
                try:
                    memory.seek(candidate + 52)
                    if int.from_bytes(memory.read(4), sys.byteorder) == self.qp.qp_num:
                        return candidate
                except (OSError, ValueError, OverflowError):
                    continue
        raise RuntimeError("no ibv_qp in pyverbs' object")

    def post_recv(self, request):
        self.qp.post_recv(request)

    def close(self):
        for libibverbs, gid, membership in self.memberships:
            libibverbs.ibv_detach_mcast(ctypes.c_void_p(self.address()), gid, 0)
            membership.close()
        self.qp.close()
        for thing in [*self.queues.values(), *self.address_handles]:
            thing.close()


class SharedReceives:
    def __init__(self, peer):
        self.srq = SRQ(peer.pd, SrqInitAttr(SrqAttr(max_wr=2 * DEPTH)))
        self.received = 0

    def post_recv(self, request):
        self.srq.post_recv(request)

    def close(self):
        self.srq.close()


class Peer:
    def __init__(self):
        self.context = Context(name="rxe0")
        self.pd = PD(self.context)
        self.objects, self.next = {}, 1

    def keep(self, thing):
        name, self.next = self.next, self.next + 1
        self.objects[name] = thing
        return name

    def info(self, c):
        return {"gids": [str(self.context.query_gid(1, i)) for i in range(3)], "kernel": os.uname().release}

    # --- memory ---

    def memory(self, c):
        mr = MR(self.pd, c["length"], c.get("access", EVERYTHING))
        return {"id": self.keep(mr), "addr": mr.buf, "rkey": mr.rkey}

    def bytes_of(self, c):
        mr = self.objects[c["memory"]]
        return memoryview((ctypes.c_ubyte * mr.length).from_address(mr.buf)).cast("B")

    @staticmethod
    def whole(length, parts):
        whole = bytearray(bytes([UNTOUCHED]) * length)
        for offset, size, seed in parts:
            if seed is not None:
                whole[offset:offset + size] = pattern(size, seed)
        return whole

    def fill(self, c):
        memory = self.bytes_of(c)
        memory[:] = self.whole(len(memory), c["parts"])

    def check(self, c):
        memory, end = self.bytes_of(c), time.monotonic() + c.get("ms", 0) / 1000
        expected = self.whole(len(memory), c["parts"])
        while True:
            got = bytearray(memory)
            for offset, size, seed in c["parts"]:
                if seed is None:
                    got[offset:offset + size] = expected[offset:offset + size]
            if got == expected:
                return {"wrong": None}
            if time.monotonic() >= end:
                return {"wrong": next(i for i in range(len(got)) if got[i] != expected[i])}
            time.sleep(0.005)

    def peek(self, c):
        return {"hex": bytes(self.bytes_of(c)[c["offset"]:c["offset"] + c["length"]]).hex()}

    def poke(self, c):
        data = bytes.fromhex(c["hex"])
        self.bytes_of(c)[c["offset"]:c["offset"] + len(data)] = data

    # --- queue pairs ---

    def queue_pair(self, c):
        pair = QueuePair(self, c["kind"], self.objects[c["srq"]] if "srq" in c else None)
        return {"id": self.keep(pair), "qpn": pair.qp.qp_num}

    def srq(self, c):
        return {"id": self.keep(SharedReceives(self))}

    def join(self, c):
        self.objects[c["qp"]].join(c["group"])

    def route(self, c):
        raw = socket.inet_pton(socket.AF_INET6, c["gid"]).hex()          # pyverbs takes only the long form
        gid = GID(":".join(raw[i:i + 4] for i in range(0, 32, 4)))
        route = GlobalRoute(dgid=gid, sgid_index=c["sgid_index"], hop_limit=64,
                            traffic_class=c.get("traffic_class", 0), flow_label=c.get("flow_label", 0))
        return AHAttr(gr=route, is_global=1, port_num=1)

    def connect(self, c):
        pair, attr = self.objects[c["qp"]], QPAttr(port_num=1)
        attr.pkey_index, attr.sq_psn = 0, c["sq_psn"]
        if pair.kind == "ud":
            attr.qkey = QKEY
        else:
            attr.qp_access_flags = c.get("access", FOR_QP)
            attr.path_mtu, attr.dest_qp_num, attr.rq_psn = MTUS[c["mtu"]], c["qpn"], c["rq_psn"]
            attr.ah_attr = self.route(c)
        if pair.kind == "rc":
            attr.max_dest_rd_atomic = attr.max_rd_atomic = c.get("rd_atomic", 16)
            attr.min_rnr_timer, attr.timeout = c.get("rnr_timer", 12), c.get("timeout", 18)
            attr.retry_cnt, attr.rnr_retry = c.get("retry", 7), c.get("rnr_retry", 7)
        pair.qp.to_rts(attr)

    def state(self, c):
        return {"state": self.objects[c["qp"]].qp.query(v.IBV_QP_STATE)[0].qp_state}

    def destroy(self, c):
        self.objects.pop(c["id"]).close()

    # --- work ---

    def receive(self, c):
        queue, mr = self.objects[c["qp"]], self.objects[c["memory"]]
        for offset, length in c["parts"]:
            sge = SGE(mr.buf + offset, length, mr.lkey)
            queue.post_recv(RecvWR(wr_id=queue.received, num_sge=1, sg=[sge]))
            queue.received += 1

    def send(self, c):
        pair, mr, op = self.objects[c["qp"]], self.objects[c["memory"]], c["op"]
        handle = None
        if pair.kind == "ud":
            handle = AH(self.pd, attr=self.route(c["to"]))
            pair.address_handles.append(handle)
        for part in c["parts"]:
            sge = SGE(mr.buf + part["offset"], part["length"], mr.lkey)
            immediate = part["invalidate"] if op == "send_inv" else socket.htonl(part.get("imm", 0))
            flags = v.IBV_SEND_SIGNALED | (v.IBV_SEND_FENCE if part.get("fence") else 0)
            wr = SendWR(wr_id=pair.sent, opcode=OPERATIONS[op], num_sge=1, sg=[sge], imm_data=immediate, send_flags=flags)
            if op in ("write", "write_imm", "read"):
                wr.set_wr_rdma(part["rkey"], part["addr"])
            elif op in ("compare_swap", "fetch_add"):
                wr.set_wr_atomic(part["rkey"], part["addr"], part["compare"], part.get("swap", 0))
            elif handle:
                wr.set_wr_ud(handle, c["to"]["qpn"], QKEY)
            pair.qp.post_send(wr)
            pair.sent += 1

    def window(self, c):
        pair, mr = self.objects[c["qp"]], self.objects[c["memory"]]
        window = MW(self.pd, v.IBV_MW_TYPE_2)
        wr = SendWR(wr_id=pair.sent, opcode=v.IBV_WR_BIND_MW, num_sge=0, sg=None, send_flags=v.IBV_SEND_SIGNALED)
        wr.set_bind_wr(window, MWBindInfo(mr, mr.buf + c["offset"], c["length"], c["access"]))
        pair.qp.post_send(wr)
        pair.sent += 1
        completion = self.poll({"qp": c["qp"], "queue": "send", "count": 1, "ms": 5000})["completions"]
        if [w["status"] for w in completion] != [v.IBV_WC_SUCCESS]:
            window.close()
            raise RuntimeError(f"the bind ends with {completion}")
        # pyverbs binds with the key that follows, and does not tell.
        return {"id": self.keep(window), "rkey": window.rkey & ~0xFF | (window.rkey + 1) & 0xFF}

    def poll(self, c):
        cq, found, end = self.objects[c["qp"]].queues[c["queue"]], [], time.monotonic() + c["ms"] / 1000
        while len(found) < c["count"]:
            count, completions = cq.poll(c["count"] - len(found))
            for w in completions:
                has = w.status == v.IBV_WC_SUCCESS and w.wc_flags
                found.append({"wr_id": w.wr_id, "status": w.status, "opcode": w.opcode, "length": w.byte_len,
                              "imm": socket.ntohl(w.imm_data) if has & v.IBV_WC_WITH_IMM else None,
                              "invalidated": w.imm_data if has & INVALIDATED else None})
            if not count:
                if time.monotonic() >= end:
                    break
                time.sleep(0.001)
        return {"completions": found}

    # --- the connection ---

    def all(self, c):
        return {"answers": [self.carry_out(command) for command in c["commands"]]}

    def carry_out(self, command):
        return {"ok": True, **(getattr(self, command["do"])(command) or {})}

    def release(self, c):
        """Ends everything, in an order that no use forbids."""
        for kind in (MW, QueuePair, SharedReceives, MR):
            for name in [n for n, thing in self.objects.items() if isinstance(thing, kind)]:
                self.objects.pop(name).close()

    def serve(self, stream):
        for line in stream.makefile("r"):
            try:
                command = json.loads(line)
                answer = self.carry_out(command)
            except Exception as reason:             # whatever it is, whoever asked wants to know
                answer = {"error": f"{line.strip()[:200]}: {type(reason).__name__}: {reason}"}
            stream.sendall(json.dumps(answer).encode() + b"\n")


def main():
    peer, listener = Peer(), socket.create_server(("", PORT), family=socket.AF_INET6, dualstack_ipv6=True)
    print(f"listening on TCP port {PORT}", flush=True)
    while True:
        stream, _ = listener.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            peer.serve(stream)
        except OSError as reason:
            print(f"the connection ends: {reason}", flush=True)
        stream.close()
        peer.release({})


if __name__ == "__main__":
    sys.exit(main())
