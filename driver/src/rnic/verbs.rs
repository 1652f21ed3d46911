//! libibverbs, loaded at run time.

use std::ffi::{OsStr, c_char, c_int, c_uint, c_void};
use std::io;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use libloading::Library;

use super::Rnic;
use super::abi::{
    Ah, AhAttr, AsyncEvent, CompChannel, Context, Cq, Device as RawDevice, DeviceAttr, GidEntry, Mr, Pd,
    PortAttr, Qp, QpAttr, QpInitAttr, Srq, SrqAttr, SrqInitAttr,
};
use super::device::Device;
use super::functions::functions;
use super::remedy;
use crate::Error;

/// The library's name, which its ABI has kept since 2006. The loader searches its usual paths (`LD_LIBRARY_PATH`,
/// /etc/ld.so.conf).
const NAME: &str = "libibverbs.so.1";

/// The limit for a device list of the library.
const DEVICES_MAX: usize = 1024;
/// Bytes of a name (IBV_SYSFS_NAME_MAX).
const NAME_MAX: usize = 64;

/// The loaded libibverbs.
#[derive(Clone, Debug)]
pub struct Verbs(Arc<Loaded>);

/// The library, kept as long as any of its objects exists.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) functions: Functions,
    /// Contains the functions.
    _library: Library,
}

functions! {
    /// The functions of libibverbs.
    "rdma-core 33";
    get_device_list, "ibv_get_device_list": fn(*mut c_int) -> *mut *mut RawDevice;
    free_device_list, "ibv_free_device_list": fn(*mut *mut RawDevice);
    get_device_name, "ibv_get_device_name": fn(*mut RawDevice) -> *const c_char;
    open_device, "ibv_open_device": fn(*mut RawDevice) -> *mut Context;
    close_device, "ibv_close_device": fn(*mut Context) -> c_int;
    query_device, "ibv_query_device": fn(*mut Context, *mut DeviceAttr) -> c_int;
    query_port, "ibv_query_port": fn(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid_table, "_ibv_query_gid_table": fn(*mut Context, *mut GidEntry, usize, u32, usize) -> isize;
    query_pkey, "ibv_query_pkey": fn(*mut Context, u8, c_int, *mut u16) -> c_int;
    get_async_event, "ibv_get_async_event": fn(*mut Context, *mut AsyncEvent) -> c_int;
    ack_async_event, "ibv_ack_async_event": fn(*mut AsyncEvent);
    alloc_pd, "ibv_alloc_pd": fn(*mut Context) -> *mut Pd;
    dealloc_pd, "ibv_dealloc_pd": fn(*mut Pd) -> c_int;
    reg_mr, "ibv_reg_mr_iova2": fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
    dereg_mr, "ibv_dereg_mr": fn(*mut Mr) -> c_int;
    create_comp_channel, "ibv_create_comp_channel": fn(*mut Context) -> *mut CompChannel;
    destroy_comp_channel, "ibv_destroy_comp_channel": fn(*mut CompChannel) -> c_int;
    get_cq_event, "ibv_get_cq_event": fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events, "ibv_ack_cq_events": fn(*mut Cq, c_uint);
    create_cq, "ibv_create_cq": fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    destroy_cq, "ibv_destroy_cq": fn(*mut Cq) -> c_int;
    create_qp, "ibv_create_qp": fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp, "ibv_modify_qp": fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    query_qp, "ibv_query_qp": fn(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
    destroy_qp, "ibv_destroy_qp": fn(*mut Qp) -> c_int;
    create_srq, "ibv_create_srq": fn(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
    modify_srq, "ibv_modify_srq": fn(*mut Srq, *mut SrqAttr, c_int) -> c_int;
    query_srq, "ibv_query_srq": fn(*mut Srq, *mut SrqAttr) -> c_int;
    destroy_srq, "ibv_destroy_srq": fn(*mut Srq) -> c_int;
    create_ah, "ibv_create_ah": fn(*mut Pd, *mut AhAttr) -> *mut Ah;
    destroy_ah, "ibv_destroy_ah": fn(*mut Ah) -> c_int;
    attach_mcast, "ibv_attach_mcast": fn(*mut Qp, *const [u8; 16], u16) -> c_int;
    detach_mcast, "ibv_detach_mcast": fn(*mut Qp, *const [u8; 16], u16) -> c_int;
    // rdma-core 34
    ? reg_dmabuf_mr, "ibv_reg_dmabuf_mr": fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;
}

impl Verbs {
    /// Loads the library.
    ///
    /// # Errors
    /// [`Error::NoVerbs`] if it is absent, or older than rdma-core 33, the first with all functions that are called.
    pub fn load() -> Result<Verbs, Error> {
        Verbs::load_from(NAME)
    }

    /// Loads a library by its path instead of the system's.
    ///
    /// # Errors
    /// As [`load`](Verbs::load).
    pub fn load_from(path: impl AsRef<OsStr>) -> Result<Verbs, Error> {
        let path = path.as_ref();
        let no_verbs = |reason: String| Error::NoVerbs { library: path.display().to_string(), reason };
        // SAFETY: the constructors of libibverbs have no preconditions. Its destructors do not run before `Loaded` is
        // dropped, after all objects opened by it.
        let library = unsafe { Library::new(path) }.map_err(|error| {
            no_verbs(remedy::of_library(&error, "libibverbs1, and ibverbs-providers for the card"))
        })?;
        let functions = Functions::find(&library).map_err(no_verbs)?;
        Ok(Verbs(Arc::new(Loaded { functions, _library: library })))
    }

    /// The devices, each with its attributes. No devices is not an error.
    ///
    /// # Errors
    /// [`Error::Verbs`] if they can't be listed.
    pub fn rnics(&self) -> Result<Vec<Rnic>, Error> {
        let Some(list) = List::new(&self.0.functions)? else { return Ok(Vec::new()) };
        let rnic = |device: &NonNull<RawDevice>| {
            let name = self.name(*device);
            // SAFETY: the device is of a list that was not freed yet.
            let opened = unsafe { Device::open(&self.0, *device, &name) };
            let details = opened.and_then(|device| device.details());
            Rnic { name, details }
        };
        Ok(list.devices().iter().map(rnic).collect())
    }

    /// Opens the device of this name.
    ///
    /// # Errors
    /// [`Error::NoRnic`] if it does not exist, with the names of existing devices; [`Error::Verbs`].
    pub fn open(&self, name: &str) -> Result<Device, Error> {
        let list = List::new(&self.0.functions)?;
        let devices = list.as_ref().map(List::devices).unwrap_or_default();
        match devices.iter().find(|device| self.name(**device) == name) {
            // SAFETY: the device is of a list that was not freed yet.
            Some(device) => unsafe { Device::open(&self.0, *device, name) },
            None => {
                let there: Vec<String> = devices.iter().map(|device| self.name(*device)).collect();
                let unlisted = remedy::unlisted(&there);
                Err(Error::NoRnic { name: name.to_owned(), there, unlisted })
            }
        }
    }

    fn name(&self, device: NonNull<RawDevice>) -> String {
        name(&self.0.functions, device)
    }
}

pub(super) fn name(functions: &Functions, device: NonNull<RawDevice>) -> String {
    // SAFETY: the device is of a list that was not freed yet, or is open.
    let name = unsafe { (functions.get_device_name)(device.as_ptr()) };
    if name.is_null() {
        return String::new();
    }
    // SAFETY: the name is an array of IBV_SYSFS_NAME_MAX bytes in the device, terminated by a zero. No more is read if
    // the zero is missing.
    let len = unsafe { libc::strnlen(name, NAME_MAX) };
    // SAFETY: as above. This many bytes were just read.
    String::from_utf8_lossy(unsafe { slice::from_raw_parts(name.cast(), len) }).into_owned()
}

/// A list of devices. It is freed when it is dropped.
struct List<'a> {
    functions: &'a Functions,
    list: NonNull<*mut RawDevice>,
}

impl<'a> List<'a> {
    /// Returns `None` if there are no devices: then the library may have no list either.
    fn new(functions: &'a Functions) -> Result<Option<List<'a>>, Error> {
        let mut count = 0;
        // SAFETY: it only writes the number of devices.
        let list = unsafe { (functions.get_device_list)(&mut count) };
        match NonNull::new(list) {
            Some(list) => Ok(Some(List { functions, list })),
            None => match io::Error::last_os_error() {
                // The kernel has no RDMA.
                error if error.raw_os_error() == Some(libc::ENOSYS) => Ok(None),
                source => Err(Error::Verbs {
                    call: "ibv_get_device_list",
                    device: String::new(),
                    source,
                    remedy: String::new(),
                }),
            },
        }
    }

    /// The devices up to the null pointer that ends the list. The returned number is not needed.
    fn devices(&self) -> Vec<NonNull<RawDevice>> {
        // SAFETY: all positions up to that of the null pointer are in the list.
        let at = |place: usize| NonNull::new(unsafe { *self.list.as_ptr().add(place) });
        (0..DEVICES_MAX).map_while(at).collect()
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: it was returned by `ibv_get_device_list`, and is freed once. Open devices remain valid.
        unsafe { (self.functions.free_device_list)(self.list.as_ptr()) };
    }
}
