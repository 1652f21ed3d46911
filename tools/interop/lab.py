"""The guests of `rxe` as captures and experiments use them: commands, verbs peers, queue pairs, netem, recordings."""
import json
import os
import socket
import struct
import subprocess
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
NETNS = f"ferroce-capture-{os.getpid()}"
ADDRESS = {1: "10.77.0.11", 2: "10.77.0.12"}
GID = {1: {1: "::ffff:10.77.0.11", 2: "::ffff:10.77.0.12"}, 2: {1: "fd77::11", 2: "fd77::12"}}     # by index, guest
FIRST_PSN = {1: 0x100, 2: 0xFFFFFE}
SUCCESS, RETRY_EXC, RNR_RETRY_EXC, REM_INV_REQ, REM_ACCESS, REM_OP = 0, 12, 13, 9, 10, 11
SIZES = (0, 1, 64, 1024, 1025, 2500)
IMMEDIATE = 0x01020304
LOCAL_WRITE = 1


# --- the guests ---

def rxe(*arguments, guest=1, guests=2):
    environment = {**os.environ, "RXE_NETNS": NETNS, "RXE_GUEST": str(guest), "RXE_GUESTS": str(guests)}
    return subprocess.Popen([f"{HERE}/rxe", *arguments], env=environment, stdout=subprocess.PIPE, text=True)


def succeed(process):
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"{' '.join(process.args)} ends with {process.returncode}: {output}")
    return output


def run(guest, command):
    return succeed(rxe("run", f"timeout 60 {command}", guest=guest))


class Peer:
    """The verbs peer of a guest (guest/peer.py)."""

    def __init__(self, guest):
        run(guest, "sh -c 'python3 /peer.py >/tmp/peer.log 2>&1 &'")
        end = time.monotonic() + 60
        while True:
            try:
                self.stream = socket.create_connection((ADDRESS[guest], 18600), timeout=60)
                break
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
        self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers = self.stream.makefile("r")

    def __call__(self, do, **arguments):
        self.stream.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
        answer = json.loads(self.answers.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


class Pair:
    """Connected queue pairs of the two guests, with memory for each."""
    peers = {}

    def __init__(self, kind="rc", gid=1, mtu=1024, own=None, both=None, alone=True, srq=None):
        """`own` are terms of one guest's queue pair, by guest; `both` are of both. All that was there before ends,
        unless it is to stay (`alone`). `srq` is what guest 2's receives come from."""
        self.kind, self.gid = kind, gid
        if alone:
            self.release()
        shared = {1: {}, 2: {"srq": srq} if srq else {}}
        self.qp = {g: peer("queue_pair", kind=kind, **shared[g]) for g, peer in self.peers.items()}
        self.memory = {g: peer("memory", length=65536) for g, peer in self.peers.items()}
        for g, peer in self.peers.items():
            terms = {"qp": self.qp[g]["id"], "gid": GID[gid][3 - g], "sgid_index": gid, "qpn": self.qp[3 - g]["qpn"],
                     "mtu": mtu, "sq_psn": FIRST_PSN[g], "rq_psn": FIRST_PSN[3 - g], "rd_atomic": 4}
            peer("connect", **{**terms, **(both or {}), **(own or {}).get(g, {})})

    @classmethod
    def release(cls):
        for peer in cls.peers.values():
            peer("release")

    def fill(self, guest, length, seed):
        self.peers[guest]("fill", memory=self.memory[guest]["id"], parts=[[0, length, seed]])

    def check(self, guest, length, seed, offset=0):
        parts = [[0, offset, None], [offset, length, seed]]
        wrong = self.peers[guest]("check", memory=self.memory[guest]["id"], parts=parts, ms=2000)["wrong"]
        assert wrong is None, f"byte {wrong} at guest {guest} is wrong"

    def receive(self, length, count=1):
        self.receive_at([[0, length]] * count)

    def receive_at(self, parts):
        self.peers[2]("receive", qp=self.qp[2]["id"], memory=self.memory[2]["id"], parts=parts)

    def ask(self, op, length=0, count=1, **more):
        far = {"addr": self.memory[2]["addr"], "rkey": self.memory[2]["rkey"], "offset": 0, "length": length}
        far["addr"] += more.pop("beyond", 0)
        to = {"gid": GID[self.gid][2], "sgid_index": self.gid, "qpn": self.qp[2]["qpn"]}
        self.peers[1]("send", qp=self.qp[1]["id"], op=op, memory=self.memory[1]["id"], to=to, parts=[{**far, **more}] * count)

    def done(self, guest=1, count=1, status=SUCCESS, ms=20000):
        queue = "send" if guest == 1 else "receive"
        found = self.peers[guest]("poll", qp=self.qp[guest]["id"], queue=queue, count=count, ms=ms)["completions"]
        assert len(found) == count and all(w["status"] == status for w in found), f"guest {guest}: {found}"
        return found


# --- what is recorded ---

class Recording:
    """The RoCEv2 frames that pass a guest's tap, as a classic pcap."""
    HEADER = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262144, 1)
    SO_TIMESTAMPNS = 35

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self.socket.setsockopt(socket.SOL_SOCKET, self.SO_TIMESTAMPNS, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        self.socket.bind(("tap1", 0))
        self.socket.settimeout(0.1)
        self.ends = False
        self.thread = threading.Thread(target=self.record)
        self.thread.start()

    def __exit__(self, *_):
        time.sleep(0.4)                     # for what is still on its way
        self.ends = True
        self.thread.join()
        self.socket.close()

    def record(self):
        with open(self.path, "wb") as file:
            file.write(self.HEADER)
            while not self.ends:
                try:
                    frame, ancillary, _, _ = self.socket.recvmsg(65536, 64)
                except TimeoutError:
                    continue
                if not self.is_roce(frame):
                    continue
                seconds, nanoseconds = struct.unpack("@qq", ancillary[0][2][:16])
                file.write(struct.pack("<IIII", seconds, nanoseconds // 1000, len(frame), len(frame)) + frame)

    @staticmethod
    def is_roce(frame):
        is_udp = {b"\x08\x00": (23, 36), b"\x86\xdd": (20, 56)}.get(frame[12:14])
        return is_udp and len(frame) > is_udp[1] + 2 and frame[is_udp[0]] == 17 and frame[is_udp[1]:is_udp[1] + 2] == b"\x12\xb7"


CASES, JUMBO = {}, set()


def case(function):
    CASES[function.__name__] = function
    return function


def jumbo(function):
    JUMBO.add(function.__name__)
    return case(function)


class Shaped:
    """While packets leave some guests, or reach them, through a netem that does so."""

    def __init__(self, how, guests, arriving=False):
        self.how, self.guests, self.arriving, self.said = how, guests, arriving, ""
        self.device = "ifb0" if arriving else "eth0"

    def __enter__(self):
        for guest in self.guests:
            if self.arriving:
                run(guest, "ip link set ifb0 mtu 9000 up")
            run(guest, f"tc qdisc add dev {self.device} root netem {self.how} limit 100000")
            if self.arriving:
                run(guest, "tc qdisc add dev eth0 ingress")
                run(guest, "tc filter add dev eth0 ingress matchall action mirred egress redirect dev ifb0")
        return self

    def __exit__(self, *_):
        for guest in self.guests:
            self.said += run(guest, f"tc -s qdisc show dev {self.device}")
            if self.arriving:
                run(guest, "tc qdisc del dev eth0 ingress")
            run(guest, f"tc qdisc del dev {self.device} root")

    @property
    def lost(self):
        return sum(int(part.split(",")[0]) for part in self.said.split("dropped ")[1:])


def programs(server, client, ready):
    """Of rdma-core, unmodified; `ready` succeeds in guest 2 once the server listens."""
    running = rxe("run", f"timeout 60 {server}", guest=2)
    run(2, f"sh -c 'for i in $(seq 100); do {ready} && exit; sleep 0.1; done; exit 1'")
    run(1, client)
    succeed(running)


LISTENS_CM = "rdma resource show cm_id | grep -q LISTEN"
LISTENS_TCP = r'grep -q ":{:04X} .* 0A " /proc/net/tcp /proc/net/tcp6'
