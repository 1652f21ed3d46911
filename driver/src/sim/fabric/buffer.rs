//! The memory of a switch, and its accounting.

use super::config::{BufferConfig, CLASSES, PfcConfig};
use super::event::Picos;
use crate::prefetch;

/// The stored bytes of a switch, by ingress port.
pub(super) struct Buffer {
    config: BufferConfig,
    /// Classes with PFC.
    lossless: u8,
    /// Used bytes of the pool.
    used: u64,
    ports: Vec<Ingress>,
}

/// The accounting of one ingress port.
struct Ingress {
    headroom: u64,
    classes: [IngressClass; CLASSES],
}

#[derive(Clone, Copy)]
struct IngressClass {
    /// Bytes of the pool, for a class with PFC.
    bytes: u64,
    headroom: u64,
    /// While the other end is paused: the time of the next renewal.
    renewal: Option<Picos>,
}

impl Buffer {
    pub(super) fn new(config: BufferConfig, pfc: Option<PfcConfig>) -> Buffer {
        Buffer { config, lossless: pfc.map_or(0, |pfc| pfc.classes), used: 0, ports: Vec::new() }
    }

    /// Adds a port; `needed` is the number of bytes that can still arrive after a pause of a class.
    pub(super) fn add_port(&mut self, needed: u64) {
        let classes = [IngressClass { bytes: 0, headroom: 0, renewal: None }; CLASSES];
        self.ports.push(Ingress { headroom: self.config.headroom.unwrap_or(needed), classes });
    }

    /// Prefetches the state of a class of a port.
    #[inline]
    pub(super) fn prefetch(&self, port: u32, class: u8) {
        if let Some(ingress) = self.ports.get(port as usize) {
            prefetch(&ingress.classes[usize::from(class)]);
        }
    }

    pub(super) fn is_lossless(&self, class: u8) -> bool {
        self.lossless & 1 << class != 0
    }

    /// Allocates memory for a frame of `len` bytes that arrived at `port` for a queue of `waiting` bytes. Returns whether
    /// there was enough.
    #[must_use]
    pub(super) fn admit(&mut self, port: u32, class: u8, len: u64, waiting: u64) -> bool {
        let BufferConfig { pool, threshold, lossy_threshold, .. } = self.config;
        let fits = self.used + len <= pool;
        if !self.is_lossless(class) {
            let admits = fits && waiting + len <= lossy_threshold.bytes(pool, self.used + len);
            self.used += if admits { len } else { 0 };
            return admits;
        }
        let Ingress { headroom, classes } = &mut self.ports[port as usize];
        let ingress = &mut classes[usize::from(class)];
        if fits && ingress.bytes + ingress.headroom + len <= threshold.bytes(pool, self.used + len) {
            ingress.bytes += len;
            self.used += len;
        } else if ingress.headroom + len <= *headroom {
            ingress.headroom += len;
        } else {
            return false;
        }
        true
    }

    /// Releases the memory of a frame. Bytes in the headroom move to the pool in its place.
    pub(super) fn release(&mut self, port: u32, class: u8, len: u64) {
        if !self.is_lossless(class) {
            self.used -= len;
            return;
        }
        let ingress = &mut self.ports[port as usize].classes[usize::from(class)];
        let from_headroom = len.min(ingress.headroom);
        ingress.headroom -= from_headroom;
        ingress.bytes -= len - from_headroom;
        self.used -= len - from_headroom;
    }

    /// Whether the other end of `port` must be paused, and is not.
    pub(super) fn must_pause(&self, port: u32, class: u8) -> bool {
        let ingress = &self.ports[port as usize].classes[usize::from(class)];
        let exceeds = || ingress.headroom > 0 || ingress.bytes > self.threshold();
        self.is_lossless(class) && ingress.renewal.is_none() && exceeds()
    }

    /// Whether the other end of `port` is paused, and need not be.
    pub(super) fn may_resume(&self, port: u32, class: u8) -> bool {
        let ingress = &self.ports[port as usize].classes[usize::from(class)];
        let BufferConfig { resume_offset, resume_floor, .. } = self.config;
        let is_low = ingress.bytes + resume_offset <= self.threshold() || ingress.bytes < resume_floor;
        ingress.renewal.is_some() && ingress.headroom == 0 && (is_low || ingress.bytes == 0)
    }

    fn threshold(&self) -> u64 {
        self.config.threshold.bytes(self.config.pool, self.used)
    }

    /// When a pause that was sent must be renewed, while it lasts.
    pub(super) fn renewal(&mut self, port: u32, class: u8) -> &mut Option<Picos> {
        &mut self.ports[port as usize].classes[usize::from(class)].renewal
    }

    /// Used bytes of the pool.
    pub(super) fn used(&self) -> u64 {
        self.used
    }

    /// Used and available bytes of headroom for a port and class.
    pub(super) fn headroom(&self, port: u32, class: u8) -> (u64, u64) {
        let Ingress { headroom, classes } = &self.ports[port as usize];
        (classes[usize::from(class)].headroom, *headroom)
    }
}
