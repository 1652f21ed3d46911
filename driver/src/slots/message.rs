//! Messages between processes, with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::SLOTS;

/// The most descriptors in one message; the kernel's SCM_MAX_FD is 253.
pub(super) const DESCRIPTORS_MAX: usize = 2 * SLOTS + 8;

/// A received message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// Sends one message. Never blocks.
pub(super) fn send(socket: impl AsFd, parts: &[&[u8]], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    let parts: arrayvec::ArrayVec<IoSlice<'_>, 4> = parts.iter().map(|part| IoSlice::new(part)).collect();
    sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Receives the next message into `room`, which has room for the longest one; `None` at the end of the connection.
/// Never blocks.
pub(super) fn receive(socket: impl AsFd, room: &mut [u8]) -> io::Result<Option<Message>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, &mut [IoSliceMut::new(room)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            descriptors.extend(more);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) && descriptors.len() < DESCRIPTORS_MAX {
        // The buffer had room for all descriptors, but the process has reached its limit.
        return Err(Errno::MFILE.into());
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message that is too long"));
    }
    let bytes = room[..received.bytes.min(room.len())].to_vec();
    // Messages are never empty.
    Ok((!bytes.is_empty()).then_some(Message { bytes, descriptors }))
}
