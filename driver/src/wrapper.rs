//! The base of drivers that wrap another one.

use std::net::IpAddr;
use std::task::Waker;
use std::time::Duration;

use crate::{
    Armed, Capabilities, Error, FrameSink, FrameSource, Nanos, NextHop, PacketDriver, Refusal, Stats,
};

/// Declares [`Wrapper`] and makes every wrapper a driver. A method of [`PacketDriver`] has one line in the list below.
macro_rules! forwarded {
    (
        &self: $(fn $get:ident($($get_arg:ident: $get_type:ty),*) -> $got:ty;)*
        &mut self: $(fn $call:ident($($arg:ident: $type:ty),*) -> $returned:ty;)*
    ) => {
        /// A driver that wraps another one. It overrides the methods that it changes; all other calls go to the inner driver. A
        /// wrapper is a [`PacketDriver`].
        ///
        /// A `Box` of a driver is a wrapper too. So its methods are ambiguous if both traits are in scope: write
        /// `impl ferroce_driver::Wrapper for` without importing the name, and in it call the methods of
        /// [`inner_mut`](Wrapper::inner_mut), or of `*self.port`.
        ///
        /// A context owns its driver: what a wrapper is asked for later is in a handle that was taken before, as
        /// [`pcap::Recorder::recording`](crate::pcap::Recorder::recording).
        ///
        /// To examine or drop frames, it passes [`FilteredSink`](crate::FilteredSink) and
        /// [`FilteredSource`](crate::FilteredSource) to the inner driver.
        ///
        /// ```
        /// use ferroce_driver::{Error, FrameSink, Nanos, PacketDriver, loopback};
        ///
        /// /// Counts the polls of a port.
        /// struct Counted {
        ///     port: Box<dyn PacketDriver>,
        ///     polls: u64,
        /// }
        ///
        /// impl ferroce_driver::Wrapper for Counted {
        ///     type Inner = dyn PacketDriver;
        ///     fn inner(&self) -> &Self::Inner {
        ///         &*self.port
        ///     }
        ///     fn inner_mut(&mut self) -> &mut Self::Inner {
        ///         &mut *self.port
        ///     }
        ///     fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        ///         self.polls += 1;
        ///         self.inner_mut().rx_burst(now, sink)
        ///     }
        /// }
        ///
        /// let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
        /// let counted: Box<dyn PacketDriver> = Box::new(Counted { port: Box::new(port), polls: 0 });
        /// assert_eq!(counted.capabilities().driver, "loopback");
        /// ```
        pub trait Wrapper: Send {
            /// The inner driver.
            type Inner: PacketDriver + ?Sized;

            /// The inner driver.
            fn inner(&self) -> &Self::Inner;

            /// The inner driver.
            fn inner_mut(&mut self) -> &mut Self::Inner;

            $(
                #[doc = concat!("[`PacketDriver::", stringify!($get), "`] of the wrapper.")]
                fn $get(&self $(, $get_arg: $get_type)*) -> $got {
                    PacketDriver::$get(self.inner() $(, $get_arg)*)
                }
            )*
            $(
                #[doc = concat!("[`PacketDriver::", stringify!($call), "`] of the wrapper.")]
                #[doc = ""]
                #[doc = "# Errors"]
                #[doc = "As that method."]
                fn $call(&mut self $(, $arg: $type)*) -> $returned {
                    PacketDriver::$call(self.inner_mut() $(, $arg)*)
                }
            )*
        }

        // A method missing in the list would have the trait's default, and not reach the inner driver.
        #[deny(clippy::missing_trait_methods)]
        impl<W: Wrapper> PacketDriver for W {
            $(
                fn $get(&self $(, $get_arg: $get_type)*) -> $got {
                    Wrapper::$get(self $(, $get_arg)*)
                }
            )*
            $(
                fn $call(&mut self $(, $arg: $type)*) -> $returned {
                    Wrapper::$call(self $(, $arg)*)
                }
            )*
        }
    };
}

forwarded! {
    &self:
        fn capabilities() -> &Capabilities;
        fn waker() -> Option<Waker>;
        fn keeps() -> usize;
        fn stats() -> Stats;
        fn line_rate() -> Option<u64>;
    &mut self:
        fn rx_burst(now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error>;
        fn tx_burst(now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error>;
        fn wait(timeout: Duration) -> Result<(), Error>;
        fn arm() -> Result<Armed<'_>, Error>;
        fn disarm() -> ();
        fn resolve(peer: IpAddr) -> Result<NextHop, Error>;
        fn resolve_in_vlan(vlan: u16, peer: IpAddr) -> Result<NextHop, Error>;
        fn resolve_blocking(peer: IpAddr, timeout: Duration) -> Result<[u8; 6], Error>;
        fn next_refusal() -> Option<Refusal>;
        fn admit(address: IpAddr) -> Result<(), Error>;
        fn join(group: IpAddr) -> Result<(), Error>;
        fn leave(group: IpAddr) -> Result<(), Error>;
        fn listen(service: u64) -> Result<(), Error>;
        fn unlisten(service: u64) -> ();
}

impl<D: PacketDriver + ?Sized> Wrapper for Box<D> {
    type Inner = D;

    fn inner(&self) -> &D {
        self
    }

    fn inner_mut(&mut self) -> &mut D {
        self
    }
}
