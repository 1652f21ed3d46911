//! A librdmacm that is built when a test asks for it: every step ends well at once, peers answer as they should, and somebody
//! asks as soon as somebody listens. Each function can be let fail, and any event be raised. A call with an identifier that does
//! not exist, or that the real library would never return from, ends the process.

use std::ffi::{CString, c_char, c_int, c_uint};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{env, fs, io, process};

use libloading::Library;

/// The functions that can be let fail.
pub const FUNCTIONS: [&str; 17] = [
    "rdma_create_event_channel",
    "rdma_create_id",
    "rdma_bind_addr",
    "rdma_resolve_addr",
    "rdma_resolve_route",
    "rdma_connect",
    "rdma_listen",
    "rdma_accept",
    "rdma_reject",
    "rdma_establish",
    "rdma_disconnect",
    "rdma_notify",
    "rdma_get_cm_event",
    "rdma_ack_cm_event",
    "rdma_init_qp_attr",
    "rdma_set_option",
    "rdma_destroy_id",
];

/// A library that was built, until this is dropped.
#[derive(Debug)]
pub struct RdmaCmStub {
    folder: PathBuf,
    library: Library,
}

impl RdmaCmStub {
    /// `None`, with the reason printed, where there is no compiler.
    pub fn build() -> Option<RdmaCmStub> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let folder = env::temp_dir().join(format!("ferroce-rdmacm-{}-{count}", process::id()));
        fs::create_dir(&folder).unwrap();
        let path = folder.join("librdmacm.so.1");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/rdmacm_stub.c");
        let mut compiler = Command::new("gcc");
        compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-o"]);
        match compiler.arg(&path).arg(source).output() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                println!("skipped: no gcc to build a librdmacm with");
                return None;
            }
            output => {
                let output = output.unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            }
        }
        // SAFETY: it has neither constructors nor destructors.
        let library = unsafe { Library::new(&path) }.unwrap();
        Some(RdmaCmStub { folder, library })
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.folder.join("librdmacm.so.1")
    }

    /// How many identifiers, channels and events there are.
    pub fn live_objects(&self) -> i32 {
        // SAFETY: it takes nothing and returns a number.
        let live = unsafe { self.library.get::<unsafe extern "C" fn() -> c_int>(b"stub_cm_live") }.unwrap();
        // SAFETY: as above.
        unsafe { live() }
    }

    /// Lets the n-th call from now on of one of [`FUNCTIONS`] fail; 0: none. `no event`: `rdma_get_cm_event` returns 0
    /// and a null pointer.
    pub fn fail(&self, function: &str, nth: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
        let name = CString::new(function).unwrap();
        // SAFETY: it has this type in `rdmacm_stub.c`.
        let fail = unsafe { self.library.get::<Fail>(b"stub_cm_fail") }.unwrap();
        // SAFETY: the name lives as long as the call.
        assert_eq!(unsafe { fail(name.as_ptr(), nth) }, 0, "there is no {function}");
    }

    /// Raises an event of any number and status, of the newest identifier but `nth`; below 0: of none. A request comes to a
    /// listener.
    pub fn raise(&self, nth: i32, kind: u32, status: i32) {
        type Raise = unsafe extern "C" fn(c_int, c_uint, c_int) -> c_int;
        // SAFETY: it has this type in `rdmacm_stub.c`.
        let raise = unsafe { self.library.get::<Raise>(b"stub_cm_raise") }.unwrap();
        // SAFETY: it takes numbers.
        assert_eq!(unsafe { raise(nth, kind, status) }, 0, "there are no {nth} identifiers");
    }

    /// From now on no step that is asked for ends.
    pub fn silence(&self, yes: bool) {
        // SAFETY: it has this type in `rdmacm_stub.c`.
        let silent = unsafe { self.library.get::<unsafe extern "C" fn(c_int)>(b"stub_cm_silent") }.unwrap();
        // SAFETY: it takes a number.
        unsafe { silent(yes.into()) };
    }

    /// How long the private data of events are from now on, and whether the pointer to them is null.
    pub fn private_data(&self, length: Option<u8>, is_null: bool) {
        type Set = unsafe extern "C" fn(c_int, c_int);
        // SAFETY: it has this type in `rdmacm_stub.c`.
        let set = unsafe { self.library.get::<Set>(b"stub_cm_private_data") }.unwrap();
        // SAFETY: it takes numbers.
        unsafe { set(length.map_or(-1, c_int::from), is_null.into()) };
    }
}

impl Drop for RdmaCmStub {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
