//! The part of bpf(2) that is needed to load, attach and recognise an XDP program (`linux/bpf.h`). The attributes of
//! each command are a prefix of `union bpf_attr`; the kernel takes missing ones as zero.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Longest name of a program or map, without the NUL.
const NAME: usize = 15;

/// One eBPF instruction, in the layout of `struct bpf_insn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(super) struct Instruction {
    pub(super) code: u8,
    /// Destination register in the low nibble, source register in the high one.
    pub(super) registers: u8,
    pub(super) offset: i16,
    pub(super) immediate: i32,
}

/// The kernel's information about a loaded program.
pub(super) struct ProgramInfo {
    pub(super) name: String,
    pub(super) maps: Vec<u32>,
}

/// Creates an XSKMAP, which maps receive queues to AF_XDP sockets.
pub(super) fn create_xskmap(name: &str, entries: u32) -> io::Result<OwnedFd> {
    create_map(BPF_MAP_TYPE_XSKMAP, name, (4, 4), entries, 0)
}

/// Creates a map of at most `entries` keys of `N` bytes to values of one byte. Memory is allocated when keys are
/// inserted.
pub(super) fn create_table<const N: usize>(name: &str, entries: u32) -> io::Result<OwnedFd> {
    create_map(BPF_MAP_TYPE_HASH, name, (N as u32, 1), entries, BPF_F_NO_PREALLOC)
}

/// `sizes` are those of a key and a value.
fn create_map(
    map_type: u32,
    name: &str,
    sizes: (u32, u32),
    max_entries: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct MapCreate {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
        flags: u32,
        inner_map_fd: u32,
        numa_node: u32,
        name: [u8; NAME + 1],
    }
    let attr = MapCreate {
        map_type,
        key_size: sizes.0,
        value_size: sizes.1,
        max_entries,
        flags,
        inner_map_fd: 0,
        numa_node: 0,
        name: padded(name),
    };
    // SAFETY: the attributes contain no pointer.
    let fd = unsafe { bpf(BPF_MAP_CREATE, attr) }?;
    Ok(owned(fd))
}

/// Directs a receive queue to a socket in a map from [`create_xskmap`].
pub(super) fn direct(xskmap: &OwnedFd, queue: u32, socket: RawFd) -> io::Result<()> {
    let socket = socket as u32;
    // SAFETY: both pointers are to four bytes, the sizes of keys and values of an XSKMAP, and outlive the call.
    unsafe { change(BPF_MAP_UPDATE_ELEM, xskmap, (&raw const queue).cast(), (&raw const socket).cast()) }
}

/// Inserts a key into a table from [`create_table`] with the same `N`.
pub(super) fn insert<const N: usize>(table: &OwnedFd, key: &[u8; N], value: u8) -> io::Result<()> {
    // SAFETY: the pointers are to as many bytes as the table's keys and values have, and outlive the call.
    unsafe { change(BPF_MAP_UPDATE_ELEM, table, key.as_ptr(), &raw const value) }
}

/// Removes a key, if it exists, from a table from [`create_table`] with the same `N`.
pub(super) fn remove<const N: usize>(table: &OwnedFd, key: &[u8; N]) -> io::Result<()> {
    // SAFETY: the pointer is to as many bytes as the table's keys have, and outlives the call. No value is read.
    match unsafe { change(BPF_MAP_DELETE_ELEM, table, key.as_ptr(), std::ptr::null()) } {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}

/// # Safety
/// The pointers must be valid for the sizes of the map's keys and values. A deletion reads no value.
unsafe fn change(command: i32, map: &OwnedFd, key: *const u8, value: *const u8) -> io::Result<()> {
    #[repr(C)]
    struct MapElement {
        map: u32,
        _pad: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let attr =
        MapElement { map: map.as_raw_fd() as u32, _pad: 0, key: key as u64, value: value as u64, flags: 0 };
    // SAFETY: the caller's contract.
    unsafe { bpf(command, attr) }.map(drop)
}

/// Loads an XDP program that supports frames in several buffers (jumbo frames).
pub(super) fn load_xdp(name: &str, instructions: &[Instruction]) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct ProgLoad {
        prog_type: u32,
        count: u32,
        instructions: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log_buffer: u64,
        kernel_version: u32,
        flags: u32,
        name: [u8; NAME + 1],
        ifindex: u32,
        expected_attach_type: u32,
    }
    // bpf_redirect_map may be called by programs of any license.
    let license = c"Dual MIT/GPL";
    let attr = ProgLoad {
        prog_type: BPF_PROG_TYPE_XDP,
        count: instructions.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log_buffer: 0,
        kernel_version: 0,
        flags: BPF_F_XDP_HAS_FRAGS,
        name: padded(name),
        ifindex: 0,
        expected_attach_type: BPF_XDP,
    };
    // SAFETY: the instructions (with their count) and the license outlive the call.
    let fd = unsafe { bpf(BPF_PROG_LOAD, attr) }?;
    Ok(owned(fd))
}

/// Attaches a program to an interface as long as any process has the returned link open.
pub(super) fn attach_xdp(program: &OwnedFd, ifindex: u32, flags: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    struct LinkCreate {
        program: u32,
        ifindex: u32,
        attach_type: u32,
        flags: u32,
    }
    let attr = LinkCreate { program: program.as_raw_fd() as u32, ifindex, attach_type: BPF_XDP, flags };
    // SAFETY: the attributes contain no pointer.
    let fd = unsafe { bpf(BPF_LINK_CREATE, attr) }?;
    Ok(owned(fd))
}

pub(super) fn program_by_id(id: u32) -> io::Result<OwnedFd> {
    by_id(BPF_PROG_GET_FD_BY_ID, id)
}

pub(super) fn map_by_id(id: u32) -> io::Result<OwnedFd> {
    by_id(BPF_MAP_GET_FD_BY_ID, id)
}

pub(super) fn program_info(program: &OwnedFd) -> io::Result<ProgramInfo> {
    /// The first fields of `struct bpf_prog_info`.
    #[repr(C)]
    #[derive(Default)]
    struct ProgInfo {
        prog_type: u32,
        id: u32,
        tag: [u8; 8],
        jited_len: u32,
        xlated_len: u32,
        jited: u64,
        xlated: u64,
        load_time: u64,
        created_by: u32,
        maps_count: u32,
        maps: u64,
        name: [u8; NAME + 1],
    }
    let mut maps = [0u32; 16];
    let mut info =
        ProgInfo { maps_count: maps.len() as u32, maps: maps.as_mut_ptr() as u64, ..ProgInfo::default() };
    object_info(program, &mut info)?;
    let count = maps.len().min(info.maps_count as usize);
    Ok(ProgramInfo { name: unpadded(&info.name), maps: maps[..count].to_vec() })
}

/// The link that attaches `program` to the interface, if any.
pub(super) fn link_of(program: u32, ifindex: u32) -> io::Result<Option<OwnedFd>> {
    /// The first fields of `struct bpf_link_info`, the XDP variant.
    #[repr(C)]
    #[derive(Default)]
    struct LinkInfo {
        link_type: u32,
        id: u32,
        program: u32,
        _pad: u32,
        ifindex: u32,
        _rest: u32,
    }
    let mut id = 0;
    while let Some(next) = next_link(id)? {
        id = next;
        let link = match by_id(BPF_LINK_GET_FD_BY_ID, id) {
            Ok(link) => link,
            // Removed since it was listed.
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => continue,
            Err(e) => return Err(e),
        };
        let mut info = LinkInfo::default();
        object_info(&link, &mut info)?;
        if (info.link_type, info.program, info.ifindex) == (BPF_LINK_TYPE_XDP, program, ifindex) {
            return Ok(Some(link));
        }
    }
    Ok(None)
}

const BPF_MAP_CREATE: i32 = 0;
const BPF_MAP_UPDATE_ELEM: i32 = 2;
const BPF_MAP_DELETE_ELEM: i32 = 3;
const BPF_PROG_LOAD: i32 = 5;
const BPF_PROG_GET_FD_BY_ID: i32 = 13;
const BPF_MAP_GET_FD_BY_ID: i32 = 14;
const BPF_OBJ_GET_INFO_BY_FD: i32 = 15;
const BPF_LINK_CREATE: i32 = 28;
const BPF_LINK_GET_FD_BY_ID: i32 = 30;
const BPF_LINK_GET_NEXT_ID: i32 = 31;

const BPF_MAP_TYPE_HASH: u32 = 1;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_LINK_TYPE_XDP: u32 = 6;
/// The attach type.
const BPF_XDP: u32 = 37;
const BPF_F_XDP_HAS_FRAGS: u32 = 1 << 5;

/// # Safety
/// `attr` must have the layout of the command's part of `union bpf_attr`, and the pointers in it must be valid for all
/// that the command reads and writes.
unsafe fn bpf<T>(command: i32, mut attr: T) -> io::Result<i32> {
    // SAFETY: pointer and size describe `attr`; the rest is the caller's contract.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut attr, size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

fn by_id(command: i32, id: u32) -> io::Result<OwnedFd> {
    // SAFETY: the attributes (id, next id, open flags) contain no pointer.
    let fd = unsafe { bpf(command, [id, 0, 0]) }?;
    Ok(owned(fd))
}

fn next_link(id: u32) -> io::Result<Option<u32>> {
    // The result is returned in the attributes, so they can't be passed by value.
    let mut attr = [id, 0u32, 0];
    // SAFETY: pointer and size describe `attr`, which contains no pointer.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_LINK_GET_NEXT_ID, attr.as_mut_ptr(), size_of_val(&attr)) };
    if result == 0 {
        return Ok(Some(attr[1]));
    }
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(libc::ENOENT) { Ok(None) } else { Err(error) }
}

fn object_info<T>(object: &OwnedFd, info: &mut T) -> io::Result<()> {
    #[repr(C)]
    struct InfoByFd {
        object: u32,
        len: u32,
        info: u64,
    }
    let attr = InfoByFd {
        object: object.as_raw_fd() as u32,
        len: size_of::<T>() as u32,
        info: std::ptr::from_mut(info) as u64,
    };
    // SAFETY: `info` is a prefix of the object's info structure and its length is passed. Pointers in it are to arrays
    // of the stated counts. Both outlive the call.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, attr) }.map(drop)
}

fn owned(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just returned this descriptor, and it has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

fn padded(name: &str) -> [u8; NAME + 1] {
    let mut bytes = [0; NAME + 1];
    let len = name.len().min(NAME);
    bytes[..len].copy_from_slice(&name.as_bytes()[..len]);
    bytes
}

fn unpadded(name: &[u8]) -> String {
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    String::from_utf8_lossy(&name[..end]).into_owned()
}
