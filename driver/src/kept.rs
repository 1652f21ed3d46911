//! Received frames that are kept after the call of the sink.

use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A received frame for a [`FrameSink`](crate::FrameSink): its bytes, borrowed for the call, and a method to keep them for
/// longer.
pub struct RxFrame<'a> {
    bytes: &'a [u8],
    keeper: Option<&'a mut dyn Keeper>,
    icrc: Icrc,
}

/// The validity of a received frame's ICRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Icrc {
    /// It shows whether the frame is intact.
    Right,
    /// The same, but another IPv4 identification may make it correct: the kernel received the frame, and this identification is a
    /// guess.
    Guessed,
    /// Nothing: the frame was received through shared memory, and both ends omit the ICRC.
    LeftOut,
}

impl<'a> RxFrame<'a> {
    /// A frame of a port that can't keep frames.
    #[inline]
    pub fn borrowed(bytes: &'a [u8]) -> RxFrame<'a> {
        RxFrame { bytes, keeper: None, icrc: Icrc::Right }
    }

    /// A frame that `keeper` can keep.
    #[inline]
    pub(crate) fn new(bytes: &'a [u8], keeper: &'a mut dyn Keeper) -> RxFrame<'a> {
        RxFrame { bytes, keeper: Some(keeper), icrc: Icrc::Right }
    }

    /// The same frame, with this validity of the ICRC; [`Icrc::Right`] by default.
    pub fn with_icrc(self, icrc: Icrc) -> RxFrame<'a> {
        RxFrame { icrc, ..self }
    }

    /// The validity of its ICRC.
    #[inline]
    pub fn icrc(&self) -> Icrc {
        self.icrc
    }

    /// The bytes, until the frame is kept: a kept frame may be returned to the port during this call.
    ///
    /// ```compile_fail,E0505
    /// fn take(frame: ferroce_driver::RxFrame<'_>) {
    ///     let bytes = frame.bytes();
    ///     drop(frame.keep());
    ///     println!("{bytes:?}");
    /// }
    /// ```
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// Keeps the frame until the result is dropped. A port that receives into memory of its own lends that memory;
    /// others copy the frame.
    ///
    /// # Errors
    /// The frame itself, when the port's limit of kept frames ([`keeps`](crate::PacketDriver::keeps)) is reached. Frames
    /// that have been dropped stop counting at the next burst.
    ///
    /// ```
    /// use ferroce_driver::{KeptFrame, FrameSink, RxFrame};
    ///
    /// /// Looks at frames later.
    /// struct Later {
    ///     kept: Vec<KeptFrame>,
    ///     copied: Vec<Vec<u8>>,
    /// }
    ///
    /// impl FrameSink for Later {
    ///     fn take(&mut self, frame: RxFrame<'_>) {
    ///         match frame.keep() {
    ///             Ok(frame) => self.kept.push(frame),
    ///             Err(frame) => self.copied.push(frame.bytes().to_vec()),
    ///         }
    ///     }
    /// }
    /// ```
    pub fn keep(self) -> Result<KeptFrame, RxFrame<'a>> {
        let RxFrame { bytes, keeper, icrc } = self;
        let frame = RxFrame { bytes, keeper: None, icrc };
        let Some(keeper) = keeper else { return Err(frame) };
        keeper.keep(bytes).ok_or(frame)
    }
}

impl fmt::Debug for RxFrame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RxFrame({} bytes)", self.bytes.len())
    }
}

/// A received frame that is owned by its holder until it is dropped, on any thread. Its bytes do not change.
///
/// It may outlive its port: the memory is freed with its last frame.
pub struct KeptFrame {
    bytes: KeptBytes,
    token: usize,
    home: Arc<dyn Home>,
}

enum KeptBytes {
    Copied(Box<[u8]>),
    Lent(NonNull<[u8]>),
}

// SAFETY: the bytes are not written until `give_back`, which `Home` accepts from any thread.
unsafe impl Send for KeptFrame {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for KeptFrame {}

impl KeptFrame {
    /// A copy of a frame.
    pub(crate) fn copied(bytes: &[u8], token: usize, home: Arc<dyn Home>) -> KeptFrame {
        KeptFrame { bytes: KeptBytes::Copied(bytes.into()), token, home }
    }

    /// The frame in place, without a copy.
    ///
    /// # Safety
    /// The bytes are valid and are not written until `home` gets `token` back, or is dropped.
    pub(crate) unsafe fn lent(bytes: &[u8], token: usize, home: Arc<dyn Home>) -> KeptFrame {
        KeptFrame { bytes: KeptBytes::Lent(NonNull::from(bytes)), token, home }
    }
}

impl Deref for KeptFrame {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            KeptBytes::Copied(bytes) => bytes,
            // SAFETY: valid and not written until `home` gets the token back, as guaranteed by the creator of the value.
            KeptBytes::Lent(bytes) => unsafe { bytes.as_ref() },
        }
    }
}

impl Drop for KeptFrame {
    fn drop(&mut self) {
        self.home.give_back(self.token);
    }
}

impl fmt::Debug for KeptFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeptFrame({} bytes)", self.len())
    }
}

/// How a port keeps the frame that it hands to a sink.
pub(crate) trait Keeper {
    /// Returns `None` when the limit of kept frames is reached.
    fn keep(&mut self, bytes: &[u8]) -> Option<KeptFrame>;
}

/// The owner to which kept frames are returned.
pub(crate) trait Home: Send + Sync {
    /// Returns the frame with this token. Each is returned once.
    fn give_back(&self, token: usize);
}

/// Keeps copies, for ports that don't own the frame memory: it belongs to the peer, or is reused by the next system call.
#[derive(Debug, Default)]
pub(crate) struct Copies(Arc<Count>);

/// The most frames that copying ports keep at once.
pub(crate) const COPIES_MAX: usize = 256;

#[derive(Debug, Default)]
struct Count(AtomicUsize);

impl Keeper for Copies {
    fn keep(&mut self, bytes: &[u8]) -> Option<KeptFrame> {
        // Only this code increments it.
        if self.0.0.load(Ordering::Relaxed) >= COPIES_MAX {
            return None;
        }
        self.0.0.fetch_add(1, Ordering::Relaxed);
        Some(KeptFrame::copied(bytes, 0, self.0.clone()))
    }
}

impl Home for Count {
    fn give_back(&self, _: usize) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
