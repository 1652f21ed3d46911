//! A libibverbs that is built when a test asks for it: two devices in memory, `stub0` (GID `::ffff:10.0.0.2`) and `stub1`
//! (`::ffff:10.0.0.3`), whose queue pairs reach each other within the process.
//!
//! Sends are carried out when they are posted, by the thread that posts, or as soon as a receive is posted that they wait
//! for; so what follows is the same at every run. What the library does wrong is chosen when it is built, by the settings
//! in `rnic_stub/library.c`, or while it runs ([`Stub::fail`], [`Stub::set_status`], [`Stub::raise`],
//! [`Stub::remove_device`]).

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{env, fs, io, process};

use libloading::{Library, Symbol};

/// What is called by name. A setting names a function without `ibv_` and in capitals, such as `FAIL_REG_MR_IOVA2`.
pub const FUNCTIONS: [&str; 33] = [
    "ibv_get_device_list",
    "ibv_free_device_list",
    "ibv_get_device_name",
    "ibv_open_device",
    "ibv_close_device",
    "ibv_query_device",
    "ibv_query_port",
    "_ibv_query_gid_table",
    "ibv_query_pkey",
    "ibv_get_async_event",
    "ibv_ack_async_event",
    "ibv_alloc_pd",
    "ibv_dealloc_pd",
    "ibv_reg_mr_iova2",
    "ibv_dereg_mr",
    "ibv_create_comp_channel",
    "ibv_destroy_comp_channel",
    "ibv_get_cq_event",
    "ibv_ack_cq_events",
    "ibv_create_cq",
    "ibv_destroy_cq",
    "ibv_create_qp",
    "ibv_modify_qp",
    "ibv_query_qp",
    "ibv_destroy_qp",
    "ibv_create_srq",
    "ibv_modify_srq",
    "ibv_query_srq",
    "ibv_destroy_srq",
    "ibv_create_ah",
    "ibv_destroy_ah",
    "ibv_attach_mcast",
    "ibv_detach_mcast",
];

/// What is called by name where it is there.
pub const OPTIONAL: &str = "ibv_reg_dmabuf_mr";

/// What is called by pointer; these can fail, too.
pub const OPERATIONS: [&str; 7] = [
    "ibv_alloc_mw",
    "ibv_dealloc_mw",
    "ibv_poll_cq",
    "ibv_req_notify_cq",
    "ibv_post_srq_recv",
    "ibv_post_send",
    "ibv_post_recv",
];

/// A setting: `what` is `FAIL` or `MISSING`, and `function` one of [`FUNCTIONS`] or [`OPERATIONS`], or [`OPTIONAL`].
pub fn setting(what: &str, function: &str) -> String {
    let name = function.trim_start_matches('_').trim_start_matches("ibv_");
    format!("{what}_{}", name.to_uppercase())
}

/// The folder of the library's headers; `abi.h` is all that a program in C needs to call it.
pub const HEADERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/rnic_stub");

/// Libraries that were compiled, by their settings.
static COMPILED: Mutex<Option<HashMap<String, Vec<u8>>>> = Mutex::new(None);

/// A library that was built, until this is dropped: with state of its own, whoever loads it by [`path`](Stub::path).
#[derive(Debug)]
pub struct Stub {
    folder: PathBuf,
    library: Library,
}

impl Stub {
    /// With settings, such as `&["FAIL_CREATE_QP"]`; `STATUS_9` lets every send complete with status 9, and
    /// `NOTHING_WRONG` sets nothing. `None`, with the reason printed, where there is no compiler.
    pub fn build(settings: &[&str]) -> Option<Stub> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let compiled = compiled(settings)?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = env::temp_dir().join(format!("ferroce-rnic-{}-{count}", process::id()));
        fs::create_dir(&folder).unwrap();
        let path = folder.join("libibverbs.so.1");
        fs::write(&path, compiled).unwrap();
        // SAFETY: its constructor sets a number, and it has no destructor.
        let library = unsafe { Library::new(&path) }.unwrap();
        Some(Stub { folder, library })
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.folder.join("libibverbs.so.1")
    }

    /// The folder where it has the name of the real one, for `LD_LIBRARY_PATH`.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn function<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: each caller has the type of the function in `rnic_stub/library.c`.
        unsafe { self.library.get(name.as_bytes()) }.unwrap()
    }

    /// How many objects were made and not destroyed, open devices and lists of devices among them.
    pub fn live_objects(&self) -> i32 {
        let live_objects = self.function::<unsafe extern "C" fn() -> c_int>("stub_live_objects");
        // SAFETY: it reads a number under its lock.
        unsafe { live_objects() }
    }

    /// Lets a function fail: one of [`FUNCTIONS`] or [`OPERATIONS`]. -1: always from now on; 0: not any more; n: its n-th
    /// call from now on.
    pub fn fail(&self, function: &str, nth: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
        let name = CString::new(function).unwrap();
        // SAFETY: the name lives as long as the call.
        let returned = unsafe { self.function::<Fail>("stub_fail")(name.as_ptr(), nth) };
        assert_eq!(returned, 0, "there is no {function}");
    }

    /// Lets every send complete with that status from now on; with `None` as it should.
    pub fn set_status(&self, status: Option<u32>) {
        let set_status = self.function::<unsafe extern "C" fn(i64)>("stub_set_status");
        // SAFETY: it writes a number under its lock.
        unsafe { set_status(status.map_or(-1, i64::from)) };
    }

    /// Raises an asynchronous event of that kind of `enum ibv_event_type`. Those of queue pairs (1 to 7, 16): `which` is its
    /// number. Those of completion queues (0) and shared receive queues (14, 15): how many were made after it. All others, of
    /// all open devices: the element. Returns how many were raised.
    pub fn raise(&self, kind: i32, which: i32) -> i32 {
        let raise = self.function::<unsafe extern "C" fn(c_int, c_int) -> c_int>("stub_raise");
        // SAFETY: it looks for the object among those that there are, under its lock.
        unsafe { raise(kind, which) }
    }

    /// Lets registrations of dma-bufs fail with that number from now on; 0: not any more.
    pub fn refuse_dma_buf(&self, errno: i32) {
        let refuse = self.function::<unsafe extern "C" fn(c_int)>("stub_refuse_dma_buf");
        // SAFETY: it writes a number under its lock.
        unsafe { refuse(errno) };
    }

    /// The registrations of dma-bufs that have succeeded, up to 64 of them.
    pub fn dma_bufs(&self) -> Vec<DmaBufRegistration> {
        let told =
            self.function::<unsafe extern "C" fn(*mut DmaBufRegistration, c_int) -> c_int>("stub_dma_bufs");
        let mut room = vec![DmaBufRegistration::default(); 64];
        // SAFETY: there is room for so many, of the structure that the library has.
        let count = unsafe { told(room.as_mut_ptr(), 64) };
        room.truncate(count as usize);
        room
    }

    /// The first piece of the last work request that has one: its address, how many bytes, and its key.
    pub fn last_piece(&self) -> (u64, u32, u32) {
        let told = self.function::<unsafe extern "C" fn(*mut PostedPiece)>("stub_last_sge");
        let mut piece = PostedPiece::default();
        // SAFETY: it writes one piece, of the structure that the library has.
        unsafe { told(&mut piece) };
        (piece.addr, piece.length, piece.lkey)
    }

    /// The devices are that maker's from now on: [`MELLANOX`], or one whose provider does not copy by the processor.
    pub fn set_vendor(&self, vendor: u32) {
        let set_vendor = self.function::<unsafe extern "C" fn(u32)>("stub_set_vendor");
        // SAFETY: it writes a number under its lock.
        unsafe { set_vendor(vendor) };
    }

    /// Pulls the devices out: an event tells (8), and from then on every call fails with `EIO`, those that destroy objects
    /// among them, and there are no completions.
    pub fn remove_device(&self) {
        let remove_device = self.function::<unsafe extern "C" fn()>("stub_remove_device");
        // SAFETY: it reads and writes the library's own state, under its lock.
        unsafe { remove_device() };
    }
}

/// How a dma-buf was registered: `struct dma_buf` of `rnic_stub/objects.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DmaBufRegistration {
    /// Of the file.
    pub dev: u64,
    /// Of the file.
    pub ino: u64,
    /// Where the memory begins in it.
    pub offset: u64,
    /// How many bytes.
    pub length: u64,
    /// The first address.
    pub iova: u64,
    /// `enum ibv_access_flags`
    pub access: u64,
    /// The keys that it got.
    pub lkey: u64,
    /// See [`lkey`](DmaBufRegistration::lkey).
    pub rkey: u64,
}

/// `struct ibv_sge`
#[repr(C)]
#[derive(Default)]
struct PostedPiece {
    addr: u64,
    length: u32,
    lkey: u32,
}

/// The makers of cards that [`Stub::set_vendor`] may be told: the one that it has at first.
pub const MELLANOX: u32 = 0x02c9;
/// Whose provider does not copy by the processor.
pub const INTEL: u32 = 0x8086;
/// Whose provider copies by the processor, whatever it is told.
pub const HISILICON: u32 = 0x19e5;

impl Drop for Stub {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn compiled(settings: &[&str]) -> Option<Vec<u8>> {
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    let compiled = compiled.get_or_insert_default();
    let key = settings.join("-");
    if !compiled.contains_key(&key) {
        compiled.insert(key.clone(), compile(settings, &key)?);
    }
    compiled.get(&key).cloned()
}

fn compile(settings: &[&str], key: &str) -> Option<Vec<u8>> {
    let library = env::temp_dir().join(format!("ferroce-rnic-{}-{key}.so", process::id()));
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/rnic_stub/library.c");
    let mut compiler = Command::new("gcc");
    // One that does something wrong is built to be quick to build.
    let optimized = if matches!(settings, ["NOTHING_WRONG"] | ["LEAN"]) { "-O2" } else { "-O0" };
    compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", optimized]);
    compiler.args(settings.iter().map(|setting| match setting.strip_prefix("STATUS_") {
        Some(status) => format!("-DSTATUS={status}"),
        None => format!("-D{setting}"),
    }));
    match compiler.arg("-o").arg(&library).arg(source).output() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            println!("skipped: no gcc to build a libibverbs with");
            None
        }
        output => {
            let output = output.unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            let bytes = fs::read(&library).unwrap();
            let _ = fs::remove_file(&library);
            Some(bytes)
        }
    }
}
