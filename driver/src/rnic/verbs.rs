//! libibverbs, loaded at run time, and what it tells of devices.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::io;
use std::ptr::NonNull;
use std::slice;

use libloading::{Library, Symbol};

use super::abi::{Context, Device, DeviceAttr, GidEntry, LINK_LAYER_ETHERNET, PORT_ACTIVE, PortAttr};
use super::{Rnic, RnicDetails, RnicGid, RnicGidKind, RnicPort};
use crate::Error;

/// The library by the name that its ABI has kept since 2006. The loader finds it where it finds others
/// (`LD_LIBRARY_PATH`, /etc/ld.so.conf).
const NAME: &str = "libibverbs.so.1";

/// What a library tells is believed up to here: devices, and rows of GID tables.
const DEVICES_MAX: usize = 1024;
const GIDS_MAX: usize = 1 << 16;
/// Bytes of a name (IBV_SYSFS_NAME_MAX).
const NAME_MAX: usize = 64;

/// libibverbs, loaded.
#[derive(Debug)]
pub struct Verbs {
    functions: Functions,
    /// The functions are in it.
    _library: Library,
}

/// The functions that are called.
#[derive(Debug)]
struct Functions {
    get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut Device,
    free_device_list: unsafe extern "C" fn(*mut *mut Device),
    get_device_name: unsafe extern "C" fn(*mut Device) -> *const c_char,
    open_device: unsafe extern "C" fn(*mut Device) -> *mut Context,
    close_device: unsafe extern "C" fn(*mut Context) -> c_int,
    query_device: unsafe extern "C" fn(*mut Context, *mut DeviceAttr) -> c_int,
    query_port: unsafe extern "C" fn(*mut Context, u8, *mut PortAttr) -> c_int,
    query_gid_table: unsafe extern "C" fn(*mut Context, *mut GidEntry, usize, u32, usize) -> isize,
}

impl Verbs {
    /// Loads the library.
    ///
    /// # Errors
    /// [`Error::NoVerbs`]: there is none, or it is older than rdma-core 33, which has all that is called.
    pub fn load() -> Result<Verbs, Error> {
        Verbs::load_from(NAME)
    }

    /// Loads a library by its path, in place of the system's.
    ///
    /// # Errors
    /// As [`load`](Verbs::load).
    pub fn load_from(path: impl AsRef<OsStr>) -> Result<Verbs, Error> {
        let path = path.as_ref();
        let no_verbs = |reason: String| Error::NoVerbs { library: path.display().to_string(), reason };
        // SAFETY: libibverbs has no constructors with conditions, and none of its destructors runs before `Verbs` is dropped,
        // after everything that was opened by it.
        let library = unsafe { Library::new(path) }.map_err(|error| no_verbs(error.to_string()))?;
        macro_rules! find {
            ($name:literal) => {
                // SAFETY: the type is that of the function in infiniband/verbs.h, whose ABI the library's name stands for.
                match unsafe { library.get(concat!($name, "\0").as_bytes()) } {
                    Ok::<Symbol<'_, _>, _>(found) => *found,
                    Err(_) => {
                        return Err(no_verbs(format!(
                            "it has no function {}; rdma-core 33 or later has it",
                            $name
                        )));
                    }
                }
            };
        }
        let functions = Functions {
            get_device_list: find!("ibv_get_device_list"),
            free_device_list: find!("ibv_free_device_list"),
            get_device_name: find!("ibv_get_device_name"),
            open_device: find!("ibv_open_device"),
            close_device: find!("ibv_close_device"),
            query_device: find!("ibv_query_device"),
            query_port: find!("ibv_query_port"),
            query_gid_table: find!("_ibv_query_gid_table"),
        };
        Ok(Verbs { functions, _library: library })
    }

    /// The devices that there are, and what each says of itself; none is no error.
    ///
    /// # Errors
    /// [`Error::Verbs`] if they can't be listed.
    pub fn rnics(&self) -> Result<Vec<Rnic>, Error> {
        let Some(list) = List::new(&self.functions)? else { return Ok(Vec::new()) };
        let rnic = |device: &NonNull<Device>| {
            let name = self.name(*device);
            let details = self.details(*device, &name);
            Rnic { name, details }
        };
        Ok(list.devices().iter().map(rnic).collect())
    }

    fn name(&self, device: NonNull<Device>) -> String {
        // SAFETY: the device is of a list that was not freed yet.
        let name = unsafe { (self.functions.get_device_name)(device.as_ptr()) };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: the name is an array of IBV_SYSFS_NAME_MAX bytes in the device, which ends with a zero; no more of it is
        // read, should there be none.
        let len = unsafe { libc::strnlen(name, NAME_MAX) };
        // SAFETY: as above; that many bytes were just read.
        String::from_utf8_lossy(unsafe { slice::from_raw_parts(name.cast(), len) }).into_owned()
    }

    fn details(&self, device: NonNull<Device>, name: &str) -> Result<RnicDetails, Error> {
        let opened = Opened::new(&self.functions, device, name)?;
        let attributes = opened.attributes()?;
        let ports = 1..=attributes.phys_port_cnt;
        let mut ports: Vec<(RnicPort, usize)> =
            ports.map(|number| opened.port(number)).collect::<Result<_, _>>()?;
        let rows: usize = ports.iter().map(|(_, rows)| *rows).sum();
        for (number, gid) in opened.gids(rows.min(GIDS_MAX))? {
            // A row of a port that the device does not have belongs to none.
            if let Some((port, _)) = ports.iter_mut().find(|(port, _)| u32::from(port.number) == number) {
                port.gids.push(gid);
            }
        }
        let firmware = attributes.fw_ver.map(|byte| byte as u8);
        let firmware = CStr::from_bytes_until_nul(&firmware).map(CStr::to_string_lossy).unwrap_or_default();
        let count = |count: c_int| u32::try_from(count).unwrap_or(0);
        Ok(RnicDetails {
            firmware: firmware.into_owned(),
            vendor: attributes.vendor_id,
            part: attributes.vendor_part_id,
            max_qps: count(attributes.max_qp),
            max_qp_wr: count(attributes.max_qp_wr),
            ports: ports.into_iter().map(|(port, _)| port).collect(),
        })
    }
}

/// A list of devices, until it is dropped.
struct List<'a> {
    functions: &'a Functions,
    list: NonNull<*mut Device>,
}

impl<'a> List<'a> {
    /// `None` if there are none: then the library may have no list either.
    fn new(functions: &'a Functions) -> Result<Option<List<'a>>, Error> {
        let mut count = 0;
        // SAFETY: it writes the number of devices and no more.
        let list = unsafe { (functions.get_device_list)(&mut count) };
        match NonNull::new(list) {
            Some(list) => Ok(Some(List { functions, list })),
            None => match io::Error::last_os_error() {
                // A kernel without RDMA.
                error if error.raw_os_error() == Some(libc::ENOSYS) => Ok(None),
                source => Err(Error::Verbs { call: "ibv_get_device_list", device: String::new(), source }),
            },
        }
    }

    /// The list ends with a null pointer. The number that was told beside it is not needed.
    fn devices(&self) -> Vec<NonNull<Device>> {
        // SAFETY: places before the null pointer are in the list, and that place too.
        let at = |place: usize| NonNull::new(unsafe { *self.list.as_ptr().add(place) });
        (0..DEVICES_MAX).map_while(at).collect()
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: it came from `ibv_get_device_list`, and is freed once. Devices that were opened stay.
        unsafe { (self.functions.free_device_list)(self.list.as_ptr()) };
    }
}

/// A device, until it is dropped.
struct Opened<'a> {
    functions: &'a Functions,
    context: NonNull<Context>,
    name: &'a str,
}

impl<'a> Opened<'a> {
    fn new(functions: &'a Functions, device: NonNull<Device>, name: &'a str) -> Result<Opened<'a>, Error> {
        // SAFETY: the device is of a list that was not freed yet.
        let context = unsafe { (functions.open_device)(device.as_ptr()) };
        let source = io::Error::last_os_error();
        match NonNull::new(context) {
            Some(context) => Ok(Opened { functions, context, name }),
            None => Err(Error::Verbs { call: "ibv_open_device", device: name.to_owned(), source }),
        }
    }

    /// Of functions that return 0, or the number of an error.
    fn check(&self, call: &'static str, returned: c_int) -> Result<(), Error> {
        match returned {
            0 => Ok(()),
            _ => Err(self.error(call, io::Error::from_raw_os_error(returned.saturating_abs()))),
        }
    }

    fn error(&self, call: &'static str, source: io::Error) -> Error {
        Error::Verbs { call, device: self.name.to_owned(), source }
    }

    fn attributes(&self) -> Result<DeviceAttr, Error> {
        // SAFETY: all bytes zero are a value of it: numbers.
        let mut attributes: DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the attributes have the size that the ABI fixes.
        let returned = unsafe { (self.functions.query_device)(self.context.as_ptr(), &mut attributes) };
        self.check("ibv_query_device", returned)?;
        Ok(attributes)
    }

    /// A port, yet without its GIDs, and the rows of its GID table.
    fn port(&self, number: u8) -> Result<(RnicPort, usize), Error> {
        // SAFETY: all bytes zero are a value of it: numbers.
        let mut port: PortAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open; the function writes the 48 bytes that it has had from the beginning, or all.
        let returned = unsafe { (self.functions.query_port)(self.context.as_ptr(), number, &mut port) };
        self.check("ibv_query_port", returned)?;
        let path_mtu = u32::try_from(port.active_mtu).ok().filter(|mtu| (1..=5).contains(mtu));
        let rows = usize::try_from(port.gid_tbl_len).unwrap_or(0).min(GIDS_MAX);
        let port = RnicPort {
            number,
            is_active: port.state == PORT_ACTIVE,
            is_ethernet: port.link_layer == LINK_LAYER_ETHERNET,
            path_mtu: path_mtu.map(|code| 128 << code),
            gids: Vec::new(),
        };
        Ok((port, rows))
    }

    /// All rows that are in use, `most` of them at most, each with the number of its port.
    fn gids(&self, most: usize) -> Result<Vec<(u32, RnicGid)>, Error> {
        let empty = GidEntry { gid: [0; 16], gid_index: 0, port_num: 0, gid_type: 0, ndev_ifindex: 0 };
        let mut entries = vec![empty; most];
        // SAFETY: the context is open, and `entries` has room for `most` entries of the size that is told.
        let count = unsafe {
            let context = self.context.as_ptr();
            (self.functions.query_gid_table)(context, entries.as_mut_ptr(), most, 0, size_of::<GidEntry>())
        };
        let call = "ibv_query_gid_table";
        if count < 0 {
            let number = i32::try_from(count.saturating_neg()).unwrap_or(libc::EIO);
            return Err(self.error(call, io::Error::from_raw_os_error(number)));
        }
        let told = entries.get(..count as usize).ok_or_else(|| {
            self.error(call, io::Error::other(format!("it says {count} rows where {most} have room")))
        })?;
        let gid = |entry: &GidEntry| {
            let kind = match entry.gid_type {
                0 => RnicGidKind::InfiniBand,
                1 => RnicGidKind::RoceV1,
                2 => RnicGidKind::RoceV2,
                other => RnicGidKind::Other(other),
            };
            let interface = Some(entry.ndev_ifindex).filter(|index| *index != 0);
            (entry.port_num, RnicGid { index: entry.gid_index, gid: entry.gid, kind, interface })
        };
        Ok(told.iter().map(gid).collect())
    }
}

impl Drop for Opened<'_> {
    fn drop(&mut self) {
        // SAFETY: it came from `ibv_open_device`, nothing was made on it, and it is closed once.
        let returned = unsafe { (self.functions.close_device)(self.context.as_ptr()) };
        if returned != 0 {
            tracing::warn!(
                device = self.name,
                "ibv_close_device: {}",
                io::Error::from_raw_os_error(returned)
            );
        }
    }
}
