use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Service ids of the TCP port space: this plus the port.
pub const SERVICE_ID_TCP: u64 = 0x0000_0000_0106_0000;
/// Service ids of the UDP port space: this plus the port.
pub const SERVICE_ID_UDP: u64 = 0x0000_0000_0111_0000;
/// The Q_Key of rdma_cm's datagram services, which librdmacm sets on every datagram queue pair: `RDMA_UDP_QKEY`.
pub const RDMA_UDP_QKEY: u32 = 0x0123_4567;

/// The first 36 bytes of private data of a REQ or SIDR_REQ between ends with IP addresses and ports, like those of
/// rdma_cm. The destination port is in the service id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpCm {
    /// The source of the request.
    pub source: IpAddr,
    /// The source port.
    pub source_port: u16,
    /// The destination, of the same IP version.
    pub destination: IpAddr,
}

/// The reason why private data does not begin with IP addresses. The request is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum IpCmError {
    /// Fewer than 36 bytes.
    #[error("IP-CM header of {0} bytes: must be {len}", len = IpCm::LEN)]
    Length(usize),
    /// A version that does not exist.
    #[error("IP-CM version {0:#04x}: must be 0")]
    Version(u8),
    /// Neither IPv4 nor IPv6.
    #[error("IP-CM header for IP version {0}: must be 4 or 6")]
    IpVersion(u8),
    /// The two addresses are of two IP versions.
    #[error("IP-CM header from {0} to {1}: must be of one IP version")]
    Mixed(IpAddr, IpAddr),
}

impl IpCm {
    /// Bytes on the wire.
    pub const LEN: usize = 36;

    /// Parses the beginning of `private_data`.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn parse(private_data: &[u8]) -> Result<IpCm, IpCmError> {
        let Some((&[version, ip, port_high, port_low, ref addresses @ ..], _)) =
            private_data.split_first_chunk::<{ IpCm::LEN }>()
        else {
            return Err(IpCmError::Length(private_data.len()));
        };
        if version != 0 {
            return Err(IpCmError::Version(version));
        }
        let ip_version = ip >> 4;
        let address = |at: usize| {
            let mut bytes = [0; 16];
            bytes.copy_from_slice(&addresses[at..at + 16]);
            match ip_version {
                4 => Ok(Ipv4Addr::from([bytes[12], bytes[13], bytes[14], bytes[15]]).into()),
                6 => Ok(Ipv6Addr::from(bytes).into()),
                other => Err(IpCmError::IpVersion(other)),
            }
        };
        Ok(IpCm {
            source: address(0)?,
            source_port: u16::from_be_bytes([port_high, port_low]),
            destination: address(16)?,
        })
    }

    /// The bytes, to be followed by the application's private data.
    ///
    /// # Errors
    /// [`IpCmError::Mixed`].
    pub fn to_bytes(self) -> Result<[u8; IpCm::LEN], IpCmError> {
        let mut bytes = [0; IpCm::LEN];
        bytes[2..4].copy_from_slice(&self.source_port.to_be_bytes());
        match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                bytes[1] = 4 << 4;
                bytes[16..20].copy_from_slice(&source.octets());
                bytes[32..36].copy_from_slice(&destination.octets());
            }
            (IpAddr::V6(source), IpAddr::V6(destination)) => {
                bytes[1] = 6 << 4;
                bytes[4..20].copy_from_slice(&source.octets());
                bytes[20..36].copy_from_slice(&destination.octets());
            }
            (source, destination) => return Err(IpCmError::Mixed(source, destination)),
        }
        Ok(bytes)
    }
}
