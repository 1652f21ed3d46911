"""Captures of rdma_rxe with rdma_rxe while the network loses, reorders, repeats, damages or delays packets.

`HOW_verbs_8` and the like: what is impaired is what the guests send, so the recording, at guest 1's tap, has what is left of it.
`..._behind`: what they receive; the recording has all that was sent.
"""
from lab import ADDRESS, IMMEDIATE, LISTENS_TCP, SUCCESS, Pair, Shaped, case, programs, run

HOW = {
    "loss": "loss 5%",
    "reorder": "delay 2ms reorder 70% 50%",
    "duplicate": "duplicate 10%",
    "corrupt": "corrupt 5%",
    "delay": "delay 40ms 10ms",
}
GROUP = "239.7.7.7"


def named(name, function):
    function.__name__ = name
    return case(function)


class Several(list):
    """Connected queue pairs, whose commands each guest is given at once."""

    def __init__(self, count, **terms):
        Pair.release()
        super().__init__(Pair(alone=False, **terms) for _ in range(count))

    def at_once(self, guest, commands):
        return Pair.peers[guest]("all", commands=list(commands))["answers"]


def mixed(count, fence, mtu=1024, size=2500):
    """In each queue pair, posted at once: a READ, a WRITE, atomics, a SEND, a WRITE. With fences the first WRITE has what was read,
    and the SEND is behind the atomics. rxe of kernel 6.1 never goes on with a fenced request once a READ was repeated."""
    pairs = Several(count, mtu=mtu, own={1: {"timeout": 14}, 2: {"timeout": 14}})
    # Where things are: what is read and written back elsewhere, words, the SEND, the WRITE.
    read, back, word, sent, written = 1024, 8192, 64, 16384, 24576
    commands = []
    for number, pair in enumerate(pairs):
        seed = number % 80 * 3 + 1
        pair.peers[2]("fill", memory=pair.memory[2]["id"], parts=[[read, size, seed]])
        pair.peers[2]("poke", memory=pair.memory[2]["id"], offset=word, hex=bytes(8).hex())
        pair.peers[1]("fill", memory=pair.memory[1]["id"], parts=[[sent, size, seed + 1], [written, size, seed + 2]])
        pair.peers[2]("receive", qp=pair.qp[2]["id"], memory=pair.memory[2]["id"], parts=[[sent, size]])
        far, key = pair.memory[2]["addr"], pair.memory[2]["rkey"]
        for op, part in (
                ("read", {"offset": read, "length": size, "addr": far + read}),
                ("write", {"offset": read if fence else sent, "length": size, "addr": far + back, "fence": fence}),
                ("fetch_add", {"offset": word, "length": 8, "addr": far + word, "compare": 5}),
                ("compare_swap", {"offset": word + 8, "length": 8, "addr": far + word, "compare": 5, "swap": 77}),
                ("send_imm", {"offset": sent, "length": size, "addr": 0, "imm": IMMEDIATE + number, "fence": fence}),
                ("write", {"offset": written, "length": size, "addr": far + written})):
            commands.append({"do": "send", "qp": pair.qp[1]["id"], "op": op, "memory": pair.memory[1]["id"],
                             "parts": [{"rkey": key, **part}]})
    pairs.at_once(1, commands)
    for number, pair in enumerate(pairs):
        seed = number % 80 * 3 + 1
        pair.done(count=6, ms=25000)
        [arrived] = pair.done(2)
        assert arrived["imm"] == IMMEDIATE + number, arrived
        parts = [[read, size, seed], [back, size, seed + (not fence)], [sent, size, seed + 1], [written, size, seed + 2]]
        right = {1: [parts[0], *parts[2:], [word, 16, None]], 2: [*parts, [word, 8, None]]}
        for guest, peer in pair.peers.items():
            wrong = peer("check", memory=pair.memory[guest]["id"], parts=right[guest], ms=2000)["wrong"]
            assert wrong is None, f"queue pair {number}: byte {wrong} at guest {guest} is wrong"
        # What atomics bring back is not looked at: rxe 6.1 may complete one that it repeated without.
        word_there = pair.peers[2]("peek", memory=pair.memory[2]["id"], offset=word, length=8)["hex"]
        assert word_there == (77).to_bytes(8, "little").hex(), word_there


def shared_receives(count=4, size=2500, each=4):
    """Each queue pair SENDs some messages, whose receives are of one SRQ."""
    Pair.release()
    room = 4096
    srq = Pair.peers[2]("srq")["id"]
    pairs = [Pair(alone=False, srq=srq, own={1: {"timeout": 14}}) for _ in range(count)]
    place = Pair.peers[2]("memory", length=room * count * each)["id"]
    Pair.peers[2]("fill", memory=place, parts=[])
    Pair.peers[2]("receive", qp=srq, memory=place, parts=[[room * n, room] for n in range(count * each)])
    commands = []
    for number, pair in enumerate(pairs):
        parts = [[n * size, size, number * each + n + 1] for n in range(each)]
        pair.peers[1]("fill", memory=pair.memory[1]["id"], parts=parts)
        commands.append({"do": "send", "qp": pair.qp[1]["id"], "op": "send_imm", "memory": pair.memory[1]["id"],
                         "parts": [{"offset": at, "length": size, "addr": 0, "rkey": 0, "imm": seed} for at, _, seed in parts]})
    Pair.peers[1]("all", commands=commands)
    parts = []
    for number, pair in enumerate(pairs):
        pair.done(count=each, ms=25000)
        found = pair.done(2, count=each)
        assert [w["imm"] for w in found] == [number * each + n + 1 for n in range(each)], found
        parts += [[room * w["wr_id"], size, w["imm"]] for w in found]
    wrong = Pair.peers[2]("check", memory=place, parts=parts, ms=2000)["wrong"]
    assert wrong is None, f"byte {wrong} is wrong"


def multicast(count=40, size=700):
    """Datagrams to a group that two queue pairs of guest 2 have joined."""
    for guest in Pair.peers:
        run(guest, "ip route replace 239.0.0.0/8 dev eth0")
    pairs = Several(2, kind="ud")
    room = 1024
    for pair in pairs:
        pair.peers[2]("join", qp=pair.qp[2]["id"], group=GROUP)
        pair.peers[2]("fill", memory=pair.memory[2]["id"], parts=[])
        pair.receive_at([[room * n, room] for n in range(64)])
    sender = pairs[0]
    sender.peers[1]("fill", memory=sender.memory[1]["id"], parts=[[room * n, size, n + 1] for n in range(count)])
    to = {"gid": f"::ffff:{GROUP}", "sgid_index": 1, "qpn": 0xFFFFFF}
    parts = [{"offset": room * n, "length": size, "addr": 0, "rkey": 0, "imm": n + 1} for n in range(count)]
    sender.peers[1]("send", qp=sender.qp[1]["id"], op="send_imm", memory=sender.memory[1]["id"], to=to, parts=parts)
    sender.done(count=count)
    for pair in pairs:
        found = pair.peers[2]("poll", qp=pair.qp[2]["id"], queue="receive", count=64, ms=1500)["completions"]
        assert len(found) > count // 2 and all((w["status"], w["length"]) == (SUCCESS, size + 40) for w in found), found
        parts = [part for n, w in enumerate(found) for part in ([room * n, 40, None], [room * n + 40, size, w["imm"]])]
        wrong = pair.peers[2]("check", memory=pair.memory[2]["id"], parts=parts, ms=0)["wrong"]
        assert wrong is None, f"byte {wrong} is wrong"


def under(how, work, guests=(1, 2), arriving=False):
    def course():
        with Shaped(HOW[how], guests, arriving):
            work()
    return course


def verbs(how):
    fence = how == "duplicate"
    named(f"{how}_verbs_8", under(how, lambda: mixed(8, fence)))
    named(f"{how}_verbs_8_behind", under(how, lambda: mixed(8, fence), arriving=True))
    named(f"{how}_verbs_64", under(how, lambda: mixed(64, fence, mtu=256, size=600)))
    named(f"{how}_srq", under(how, shared_receives))
    named(f"{how}_multicast", under(how, multicast))


for how in HOW:
    verbs(how)


def perftest(name, options, theirs=None):
    """`theirs` are the server's, if they differ."""
    program = f"{name} -d rxe0 -x 1 -F "
    return lambda: programs(program + (theirs or options), f"{program}{options} {ADDRESS[2]}", LISTENS_TCP.format(18515))


for how, what, work in (
        ("loss", "write_bw_q8", perftest("ib_write_bw", "-q 8 -n 10 -s 4096")),
        ("delay", "write_bw_q8", perftest("ib_write_bw", "-q 8 -n 10 -s 4096")),
        ("loss", "read_bw_q8", perftest("ib_read_bw", "-q 8 -n 10 -s 4096")),
        ("reorder", "send_bw_events", perftest("ib_send_bw", "-e -n 20 -s 3000")),
        ("loss", "write_lat_inline", perftest("ib_write_lat", "-I 64 -n 50 -s 64")),
        ("duplicate", "send_bw_inline", perftest("ib_send_bw", "-I 64 -n 100 -s 64")),
        ("corrupt", "send_bw_srq", perftest("ib_send_bw", "--use-srq -q 4 -n 20 -s 3000")),
        ("loss", "send_bw_srq", perftest("ib_send_bw", "--use-srq -q 4 -n 20 -s 3000")),
        ("reorder", "read_bw_m256", perftest("ib_read_bw", "-m 256 -n 20 -s 3000")),
        ("corrupt", "write_bw_m512", perftest("ib_write_bw", "-m 512 -n 20 -s 3000", "-m 1024 -n 20 -s 3000")),
        ("duplicate", "atomic_bw_q8", perftest("ib_atomic_bw", "-q 8 -n 20"))):
    named(f"{how}_{what}", under(how, work))
