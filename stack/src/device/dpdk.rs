use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ferroce_driver::PacketDriver;
use ferroce_driver::dpdk::{Dpdk, DpdkConfig};

use crate::verbs::Error;
use crate::verbs::number::decimal;

/// A port of DPDK, as in `--device` after `dpdk:`.
///
/// `PORT[@ADDRESS[/PREFIX][,...][,mtu=MTU]] [EAL ARGUMENT...]`, as in
/// `net_memif0@10.0.0.1/24 --no-huge -m 512 --vdev=net_memif0,role=server,bsize=8192`. The default prefix length of the link is
/// 24 (IPv4) or 64 (IPv6). A port on an interface of the kernel (net_af_packet, net_af_xdp) needs no address. EAL starts once
/// per process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct DpdkSpec {
    /// The name of a virtual device, or a PCI address.
    pub port: String,
    /// Its addresses, with the lengths of their prefixes.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Largest IP packet; `None` for the port's MTU.
    pub mtu: Option<u32>,
    /// Arguments of DPDK's EAL.
    pub eal: Vec<String>,
}

impl DpdkSpec {
    pub(super) fn open(&self) -> Result<Box<dyn PacketDriver>, Error> {
        Ok(Box::new(Dpdk::open(
            &DpdkConfig::new(&self.port, &self.addresses).eal(self.eal.clone()).mtu(self.mtu),
        )?))
    }
}

impl FromStr for DpdkSpec {
    type Err = Error;

    /// # Errors
    /// [`Error::Invalid`] names the part that is wrong.
    fn from_str(text: &str) -> Result<DpdkSpec, Error> {
        if text.contains('\0') {
            return Err(Error::invalid("device", format!("'dpdk:{text}'"), "dpdk:PORT without a NUL byte"));
        }
        let mut words = text.split_whitespace();
        let device = words.next().unwrap_or_default();
        let (port, list) = device.split_once('@').unwrap_or((device, ""));
        if port.is_empty() {
            let expected =
                "dpdk:PORT@ADDRESS/PREFIX, as in dpdk:net_memif0@10.0.0.1/24 --no-huge -m 512 --vdev=...";
            return Err(Error::invalid("device", format!("'dpdk:{text}'"), expected));
        }
        let (mut addresses, mut mtu) = (Vec::new(), None);
        for item in list.split(',').filter(|_| device.contains('@')) {
            match item.strip_prefix("mtu=") {
                Some(number) => {
                    mtu = Some(decimal(number).ok_or_else(|| {
                        Error::invalid(
                            "device",
                            format!("'{item}'"),
                            "mtu=NUMBER, the largest IP packet in bytes",
                        )
                    })?)
                }
                None => addresses.push(address(item)?),
            }
        }
        Ok(DpdkSpec { port: port.to_owned(), addresses, mtu, eal: words.map(str::to_owned).collect() })
    }
}

impl fmt::Display for DpdkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.port)?;
        let addresses = self.addresses.iter().map(|(address, prefix)| format!("{address}/{prefix}"));
        let list: Vec<_> = addresses.chain(self.mtu.map(|mtu| format!("mtu={mtu}"))).collect();
        if !list.is_empty() {
            write!(f, "@{}", list.join(","))?;
        }
        self.eal.iter().try_for_each(|argument| write!(f, " {argument}"))
    }
}

/// An address of the port, and how much of it the others on the link have in common with it.
fn address(text: &str) -> Result<(IpAddr, u8), Error> {
    let expected = "an address with the length of its link's prefix, as in 10.0.0.1/24 or fd00::1/64";
    let wrong = || Error::invalid("device", format!("'{text}'"), expected);
    let (address, prefix) = match text.split_once('/') {
        Some((address, prefix)) => (address, Some(prefix)),
        None => (text, None),
    };
    let address: IpAddr = address.parse().map_err(|_| wrong())?;
    let (usual, most) = if address.is_ipv4() { (24, 32) } else { (64, 128) };
    let prefix = prefix.map_or(Some(usual), decimal).ok_or_else(wrong)?;
    if prefix > most { Err(wrong()) } else { Ok((address, prefix)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back() {
        for text in [
            "net_af_packet0 --vdev=net_af_packet0,iface=eth0",
            "0000:03:00.0@10.0.0.1/24,fd00::1/64,mtu=4200 -a 0000:03:00.0",
            "net_ring0@10.0.0.1/32",
        ] {
            assert_eq!(text.parse::<DpdkSpec>().expect(text).to_string(), text);
        }
        let usual: DpdkSpec = "p@10.0.0.1,fd00::1   -m  512".parse().expect("defaults");
        assert_eq!(usual.to_string(), "p@10.0.0.1/24,fd00::1/64 -m 512");
    }

    #[test]
    fn errors_name_the_invalid_part_and_the_valid_ones() {
        for (text, part, cure) in [
            ("", "'dpdk:'", "dpdk:PORT@ADDRESS"),
            ("@10.0.0.1", "'dpdk:@10.0.0.1'", "dpdk:PORT@ADDRESS"),
            ("p@", "''", "10.0.0.1/24"),
            ("p@10.0.0.256/24", "'10.0.0.256/24'", "10.0.0.1/24"),
            ("p@10.0.0.1/33", "'10.0.0.1/33'", "10.0.0.1/24"),
            ("p@fd00::1/129", "'fd00::1/129'", "fd00::1/64"),
            ("p@10.0.0.1/+24", "'10.0.0.1/+24'", "10.0.0.1/24"),
            ("p@10.0.0.1/24,mtu=+1500", "'mtu=+1500'", "mtu=NUMBER"),
            ("p@10.0.0.1/24,mtu=x", "'mtu=x'", "mtu=NUMBER"),
        ] {
            let refusal = text.parse::<DpdkSpec>().expect_err(text).to_string();
            assert!(refusal.contains(part) && refusal.contains(cure), "{refusal}");
        }
    }
}
