//! A librdmacm that is built when a test asks for it: every step ends well at once, peers answer as they should, and somebody
//! asks as soon as somebody listens. Each function can be let fail.

use std::ffi::{CString, c_char, c_int};
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

    /// Lets the n-th call from now on of one of [`FUNCTIONS`] fail; 0: none.
    pub fn fail(&self, function: &str, nth: i32) {
        type Fail = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
        let name = CString::new(function).unwrap();
        // SAFETY: it has this type in `rdmacm_stub.c`.
        let fail = unsafe { self.library.get::<Fail>(b"stub_cm_fail") }.unwrap();
        // SAFETY: the name lives as long as the call.
        assert_eq!(unsafe { fail(name.as_ptr(), nth) }, 0, "there is no {function}");
    }
}

impl Drop for RdmaCmStub {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
