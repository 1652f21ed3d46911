//! An open device.

use std::env;
use std::ffi::{CStr, OsStr, OsString, c_int};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::abi::{
    AsyncEvent as RawEvent, Context, ContextOps, Device as RawDevice, DeviceAttr, GidEntry,
    LINK_LAYER_ETHERNET, PORT_ACTIVE, PortAttr,
};
use super::remedy;
use super::verbs::{Functions, Loaded};
use super::{RnicDetails, RnicGid, RnicGidKind, RnicLimits, RnicPort};
use crate::Error;

/// The most rows that are read of GID tables, and of P_Key tables.
const GIDS_MAX: usize = 1 << 16;
const PKEYS_MAX: c_int = 128;

/// If 0, the provider of ConnectX does not let the card write short messages into completions, from which the CPU
/// copies them.
pub(super) const SCATTER: &str = "MLX5_SCATTER_TO_CQE";

/// An open device. Clones share it. It is closed with the last clone and the last object that was created on it.
#[derive(Clone, Debug)]
pub struct Device(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    loaded: Arc<Loaded>,
    context: NonNull<Context>,
    name: String,
    /// The value of `MLX5_SCATTER_TO_CQE` at that time. The provider of ConnectX reads it when a queue pair is created.
    scatter: Option<OsString>,
}

// SAFETY: libibverbs and its providers may be called by any thread, for any object. The pointer is only passed to them.
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}

/// An event of a device, or of an object on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// Its kind, a number of `enum ibv_event_type`.
    pub kind: u32,
    /// Its subject: the `id` of a queue pair, completion queue or shared receive queue, or a port number.
    pub element: u64,
}

impl Device {
    /// # Safety
    /// The device must be of a list that was not freed yet.
    pub(super) unsafe fn open(
        loaded: &Arc<Loaded>,
        device: NonNull<RawDevice>,
        name: &str,
    ) -> Result<Device, Error> {
        // SAFETY: the caller's contract.
        let context = unsafe { (loaded.functions.open_device)(device.as_ptr()) };
        let source = io::Error::last_os_error();
        match NonNull::new(context) {
            Some(context) => {
                let scatter = env::var_os(SCATTER);
                Ok(Device(Arc::new(Opened {
                    loaded: loaded.clone(),
                    context,
                    name: name.to_owned(),
                    scatter,
                })))
            }
            None => {
                let (call, device) = ("ibv_open_device", name.to_owned());
                Err(Error::Verbs { call, device, source, remedy: remedy::of_open(name) })
            }
        }
    }

    /// Such as `mlx5_0` or `rxe0`.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// The value of [`SCATTER`] when the device was opened.
    pub(super) fn scatter(&self) -> Option<&OsStr> {
        self.0.scatter.as_deref()
    }

    /// The name of another device.
    pub(super) fn name_of(&self, device: NonNull<RawDevice>) -> String {
        super::verbs::name(&self.0.loaded.functions, device)
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.0.loaded.functions
    }

    pub(super) fn context(&self) -> *mut Context {
        self.0.context.as_ptr()
    }

    /// The provider's functions that are called by pointer.
    pub(super) fn ops(&self) -> &ContextOps {
        // SAFETY: the context is open, and its table of functions does not change while it is.
        unsafe { &(*self.0.context.as_ptr()).ops }
    }

    /// Checks the result of a function that returns 0 or an error number.
    pub(super) fn check(&self, call: &'static str, returned: c_int) -> Result<(), Error> {
        match returned {
            0 => Ok(()),
            _ => Err(self.error(call, io::Error::from_raw_os_error(returned.saturating_abs()))),
        }
    }

    /// Checks the result of a function that returns an object, or a null pointer and errno.
    pub(super) fn object<T>(&self, call: &'static str, returned: *mut T) -> Result<NonNull<T>, Error> {
        let source = io::Error::last_os_error();
        NonNull::new(returned).ok_or_else(|| self.error(call, source))
    }

    pub(super) fn error(&self, call: &'static str, source: io::Error) -> Error {
        Error::Verbs { call, device: self.0.name.clone(), source, remedy: String::new() }
    }

    /// The error for a function that the provider does not have.
    pub(super) fn lacks(&self, call: &'static str) -> Error {
        self.error(call, io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }

    /// Logs that an object could not be destroyed, because nothing else can be done.
    pub(super) fn warn(&self, call: &'static str, returned: c_int) {
        if returned != 0 {
            let error = io::Error::from_raw_os_error(returned.saturating_abs());
            tracing::warn!(device = self.0.name, "{call}: {error}");
        }
    }

    fn attributes(&self) -> Result<DeviceAttr, Error> {
        // SAFETY: it consists of numbers, so all bytes zero are valid.
        let mut attributes: DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open, and the attributes have the size that the ABI fixes.
        let returned = unsafe { (self.functions().query_device)(self.context(), &mut attributes) };
        self.check("ibv_query_device", returned)?;
        Ok(attributes)
    }

    /// The number of its vendor.
    pub(super) fn vendor(&self) -> Result<u32, Error> {
        Ok(self.attributes()?.vendor_id)
    }

    /// The attributes of the device.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn details(&self) -> Result<RnicDetails, Error> {
        let attributes = self.attributes()?;
        let ports = 1..=attributes.phys_port_cnt;
        let mut ports: Vec<(RnicPort, usize)> =
            ports.map(|number| self.port(number)).collect::<Result<_, _>>()?;
        let rows: usize = ports.iter().map(|(_, rows)| *rows).sum();
        for (number, gid) in self.gids(rows.min(GIDS_MAX))? {
            // A row of a port that the device does not have is ignored.
            if let Some((port, _)) = ports.iter_mut().find(|(port, _)| u32::from(port.number) == number) {
                port.gids.push(gid);
            }
        }
        let firmware = attributes.fw_ver.map(|byte| byte as u8);
        let firmware = CStr::from_bytes_until_nul(&firmware).map(CStr::to_string_lossy).unwrap_or_default();
        Ok(RnicDetails {
            firmware: firmware.into_owned(),
            vendor: attributes.vendor_id,
            part: attributes.vendor_part_id,
            limits: RnicLimits::of(&attributes),
            ports: ports.into_iter().map(|(port, _)| port).collect(),
        })
    }

    /// A port, without its GIDs for now, and the number of rows of its GID table.
    fn port(&self, number: u8) -> Result<(RnicPort, usize), Error> {
        // SAFETY: it consists of numbers, so all bytes zero are valid.
        let mut port: PortAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the context is open. The function writes the structure's original 48 bytes, or all of it.
        let returned = unsafe { (self.functions().query_port)(self.context(), number, &mut port) };
        self.check("ibv_query_port", returned)?;
        let mtu = |code: c_int| {
            u32::try_from(code).ok().filter(|code| (1..=5).contains(code)).map(|code| 128 << code)
        };
        let rows = usize::try_from(port.gid_tbl_len).unwrap_or(0).min(GIDS_MAX);
        let pkeys = (0..c_int::from(port.pkey_tbl_len).min(PKEYS_MAX)).map(|index| self.pkey(number, index));
        let port = RnicPort {
            number,
            is_active: port.state == PORT_ACTIVE,
            is_ethernet: port.link_layer == LINK_LAYER_ETHERNET,
            path_mtu: mtu(port.active_mtu),
            max_message: port.max_msg_sz,
            pkeys: pkeys.collect::<Result<_, _>>()?,
            gids: Vec::new(),
        };
        Ok((port, rows))
    }

    fn pkey(&self, port: u8, index: c_int) -> Result<u16, Error> {
        let mut pkey = 0;
        // SAFETY: the context is open, and the function writes one P_Key, in network byte order.
        let returned = unsafe { (self.functions().query_pkey)(self.context(), port, index, &mut pkey) };
        // Unlike the others, it returns -1 and sets errno.
        let source = io::Error::last_os_error();
        match returned {
            -1 => Err(self.error("ibv_query_pkey", source)),
            _ => self.check("ibv_query_pkey", returned).map(|()| u16::from_be(pkey)),
        }
    }

    /// All rows in use, at most `most`, each with its port number.
    fn gids(&self, most: usize) -> Result<Vec<(u32, RnicGid)>, Error> {
        let empty = GidEntry { gid: [0; 16], gid_index: 0, port_num: 0, gid_type: 0, ndev_ifindex: 0 };
        let mut entries = vec![empty; most];
        // SAFETY: the context is open, and `entries` has room for `most` entries of the stated size.
        let count = unsafe {
            let query = self.functions().query_gid_table;
            query(self.context(), entries.as_mut_ptr(), most, 0, size_of::<GidEntry>())
        };
        let call = "ibv_query_gid_table";
        if count < 0 {
            let number = i32::try_from(count.saturating_neg()).unwrap_or(libc::EIO);
            return Err(self.error(call, io::Error::from_raw_os_error(number)));
        }
        let told = entries.get(..count as usize).ok_or_else(|| {
            self.error(call, io::Error::other(format!("it reports {count} rows: must be at most {most}")))
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

    /// Readable when there are asynchronous events.
    ///
    /// # Errors
    /// [`Error::Verbs`] if the device has no such descriptor.
    pub fn event_fd(&self) -> Result<BorrowedFd<'_>, Error> {
        // SAFETY: the context is open.
        let fd = unsafe { (*self.context()).async_fd };
        if fd < 0 {
            return Err(self.error("ibv_open_device", io::Error::other(format!("async_fd = {fd}"))));
        }
        // SAFETY: the descriptor is the context's until it is closed, which `self` outlives.
        Ok(unsafe { BorrowedFd::borrow_raw(fd) })
    }

    /// Makes [`event`](Device::event) not wait.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub fn set_nonblocking(&self) -> Result<(), Error> {
        set_nonblocking(self.event_fd()?).map_err(|source| self.error("fcntl of async_fd", source))
    }

    /// Takes an asynchronous event, if there is one.
    ///
    /// # Errors
    /// [`Error::Verbs`], if the device was removed.
    pub fn event(&self) -> Result<Option<AsyncEvent>, Error> {
        let mut event = RawEvent::default();
        // SAFETY: the context is open, and the event has the size that the ABI fixes.
        let returned = unsafe { (self.functions().get_async_event)(self.context(), &mut event) };
        if returned != 0 {
            return nothing_yet(io::Error::last_os_error())
                .map_err(|source| self.error("ibv_get_async_event", source));
        }
        let (kind, mut element) = (event.event_type, event.element);
        if matches!(kind, 8..=13 | 17 | 18) {
            // A port number has four bytes.
            element &= 0xffff_ffff;
        }
        // SAFETY: the event was just taken, and is acknowledged once. So the destruction of its subject does not wait
        // for it.
        unsafe { (self.functions().ack_async_event)(&mut event) };
        Ok(Some(AsyncEvent { kind, element }))
    }
}

/// Returns `None` for an error that means that there is no event.
pub(super) fn nothing_yet<T>(error: io::Error) -> io::Result<Option<T>> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
        _ => Err(error),
    }
}

pub(super) fn set_nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = fcntl_getfl(&fd)?;
    Ok(fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?)
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: it was opened by `ibv_open_device`, all objects on it were destroyed because each has a reference to
        // it, and it is closed once.
        let returned = unsafe { (self.loaded.functions.close_device)(self.context.as_ptr()) };
        if returned != 0 {
            let error = io::Error::from_raw_os_error(returned.saturating_abs());
            tracing::warn!(device = self.name, "ibv_close_device: {error}");
        }
    }
}
