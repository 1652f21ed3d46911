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
/// What each refusal ends with.
pub(crate) const COPY_INSTEAD: &str = "register memory of the host and copy (Memory::read and write, or a gpu::Queue), \
                                       or use the software stack, which copies itself";

/// Cards as `ibv_query_device` numbers their makers.
const MELLANOX: u32 = 0x02c9;
const HISILICON: u32 = 0x19e5;

/// A GPU's memory that is about to be registered.
///
/// It is registered like the host's, twice if it is for peers, because a provider does not know whose memory it is: that of
/// ConnectX copies what came with a completion, up to 64 bytes, by the CPU to the address that the work request has, which
/// faults, or with an address that peers use, 0 or what the application chose, would write over something else. So work
/// requests of this side have addresses at which nothing is, and a card whose provider is known to copy is refused.
pub(super) struct Exported {
    buffer: DmaBuf,
    /// What work requests of this side name.
    pub(super) addresses: EmptyRange,
}

impl Exported {
    /// # Errors
    /// [`Error::Verbs`] without such a function in libibverbs; [`Error::Invalid`] for what can't be; [`Error::NoDmaBuf`];
    /// [`Error::Os`] if there are no more addresses.
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

    /// The first address of work requests of this side: as far behind the start of a page as the memory is in its dma-buf.
    pub(super) fn address(&self) -> u64 {
        self.addresses.first() + self.buffer.offset % page_size()
    }

    /// # Errors
    /// [`Error::Invalid`] for addresses that the kernel can't have.
    pub(super) fn check(&self, iova: u64) -> Result<(), Error> {
        check_page(self.buffer.offset, iova, "the memory's place in its dma-buf")
    }

    /// By addresses from `iova` on. The kernel keeps the dma-buf, and with it the GPU's memory, as long as the region: the
    /// descriptor is not needed behind this.
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
        // SAFETY: the protection domain exists, and the descriptor is open. The bytes are those of the dma-buf that the device of
        // the memory gave for it; the memory is kept until the region is deregistered.
        let mr = unsafe { call(domain.as_ptr(), offset, memory.len(), iova, fd, rights as i32) };
        let gpu = memory.device().map_or("a GPU", |gpu| gpu.name());
        let registered = device.object(CALL, mr);
        registered.map_err(|error| error.remedied(|source| remedy::of_dma_buf(memory.len(), gpu, source)))
    }
}

/// That the provider of ConnectX does not copy what comes to the queue pairs that there are.
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
