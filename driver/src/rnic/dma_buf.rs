//! Memory of a GPU for an RNIC, as a dma-buf.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use super::abi::Mr;
use super::device::{Device, SCATTER};
use super::memory::{ProtectionDomain, access, check_page, page_size};
use super::remedy;
use crate::gpu::DmaBuf;
use crate::memory::EmptyRange;
use crate::{Error, Memory};

const CALL: &str = "ibv_reg_dmabuf_mr";
/// The end of each refusal's text.
pub(crate) const COPY_INSTEAD: &str = "register memory of the host and copy (Memory::read and write, or a gpu::Queue), \
                                       or use the software stack, which copies itself";

/// Vendor numbers, as reported by `ibv_query_device`.
const MELLANOX: u32 = 0x02c9;
const HISILICON: u32 = 0x19e5;

/// A GPU's memory that is being registered.
///
/// It is registered like the host's memory, twice if peers may access it, because a provider does not know the kind of
/// memory: the provider of ConnectX copies up to 64 bytes of data from a completion with the CPU to the address in the
/// work request. With the GPU's address this would fault, and with the address for peers, which is 0 or chosen by the
/// application, it would overwrite other memory. So work requests of this side use addresses without memory, and a card
/// whose provider is known to copy is refused.
pub(super) struct Exported {
    buffer: DmaBuf,
    /// The addresses in work requests of this side.
    pub(super) addresses: EmptyRange,
}

impl Exported {
    /// # Errors
    /// [`Error::Verbs`] if libibverbs does not have the function; [`Error::Invalid`] for unsupported requests;
    /// [`Error::NoDmaBuf`]; [`Error::Os`] if no addresses are left.
    pub(super) fn new(domain: &ProtectionDomain, memory: &Memory, rights: u32) -> Result<Exported, Error> {
        let device = domain.device();
        let refused = |reason: &str| {
            device.error(CALL, io::Error::other(reason.to_owned())).remedied(|_| COPY_INSTEAD.to_owned())
        };
        if device.functions().reg_dmabuf_mr.is_none() {
            return Err(refused(
                "this libibverbs has no such function; that of rdma-core 34 or later has it",
            ));
        }
        if rights & access::MW_BIND != 0 {
            let expected = "none for memory of a GPU: the kernel has no windows there".to_owned();
            return Err(Error::Invalid { parameter: "access", value: "MW_BIND".to_owned(), expected });
        }
        match device.vendor()? {
            MELLANOX => check_scatter(device)?,
            HISILICON => {
                return Err(refused(
                    "the card's provider copies short messages with the CPU, which can't reach memory of a GPU",
                ));
            }
            _ => {}
        }
        let exported = memory.export();
        let buffer = exported.map_err(|source| Error::NoDmaBuf { card: device.name().to_owned(), source })?;
        let addresses = EmptyRange::new(memory.len() + (buffer.offset % page_size()) as usize);
        let what = "reserving addresses for memory of a GPU";
        let addresses =
            addresses.map_err(|source| Error::Os { what, interface: device.name().to_owned(), source })?;
        Ok(Exported { buffer, addresses })
    }

    /// The first address of work requests of this side, with the offset in its page that the memory has in its dma-buf.
    pub(super) fn address(&self) -> u64 {
        self.addresses.first() + self.buffer.offset % page_size()
    }

    /// # Errors
    /// [`Error::Invalid`] for addresses that the kernel does not support.
    pub(super) fn check(&self, iova: u64) -> Result<(), Error> {
        check_page(self.buffer.offset, iova, "the memory's place in its dma-buf")
    }

    /// Registers it with addresses from `iova` on. The kernel keeps the dma-buf, and with it the GPU's memory, as long
    /// as the region exists: the descriptor is not needed afterwards.
    ///
    /// # Errors
    /// [`Error::Verbs`].
    pub(super) fn register(
        &self,
        domain: &ProtectionDomain,
        memory: &Memory,
        rights: u32,
        iova: u64,
    ) -> Result<NonNull<Mr>, Error> {
        let device = domain.device();
        let call = device.functions().reg_dmabuf_mr.ok_or_else(|| device.lacks(CALL))?;
        let (fd, offset) = (self.buffer.fd.as_raw_fd(), self.buffer.offset);
        // SAFETY: the protection domain exists, and the descriptor is open. The bytes are those of the dma-buf that the
        // memory's device has exported for it. The memory is kept until the region is deregistered.
        let mr = unsafe { call(domain.as_ptr(), offset, memory.len(), iova, fd, rights as i32) };
        let gpu = memory.device().map_or("a GPU", |gpu| gpu.name());
        let registered = device.object(CALL, mr);
        registered.map_err(|error| error.remedied(|source| remedy::of_dma_buf(memory.len(), gpu, source)))
    }
}

/// Checks that the provider of ConnectX does not copy received data for the existing queue pairs.
fn check_scatter(device: &Device) -> Result<(), Error> {
    let (card, value) = (device.name(), device.scatter());
    if value.is_some_and(|value| value == "0") {
        return Ok(());
    }
    let value = value.map_or("(not set)".into(), |value| value.to_string_lossy().into_owned());
    let expected = format!(
        "0 in the environment of the program, for {card} to take memory of a GPU: otherwise its provider copies short \
         messages with the CPU, which can't reach that memory; or {COPY_INSTEAD}"
    );
    Err(Error::Invalid { parameter: SCATTER, value, expected })
}
