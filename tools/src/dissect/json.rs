//! A packet as a JSON object. The names are stable, since scripts read them.

use ferroce_wire::{Bth, Extensions, NetworkHeader, Opcode, VlanTag};
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::record::{Record, granted, name, protocol, rnr_timer_us, selectivity};

impl Serialize for Record {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = Object(serializer.serialize_map(None)?);
        object.put("frame", self.frame)?;
        object.put("timestamp", self.timestamp)?;
        object.put("captured_len", self.captured_len)?;
        object.put("original_len", self.original_len)?;
        object.link(self)?;
        object.network(self)?;
        if let Some(bth) = &self.bth {
            object.bth(bth)?;
        }
        object.extensions(&self.extensions)?;
        object.put_some("payload_len", self.payload_len)?;
        object.put_some("cm", self.cm.as_ref())?;
        object.put("icrc", self.icrc)?;
        object.put_some("icrc_found", self.icrc_found)?;
        object.put_some("icrc_expected", self.icrc_expected)?;
        object.put_some("cause", self.cause)?;
        object.put_some("cause_text", self.cause_text.as_ref())?;
        object.put_some("first_of_several", self.is_joined.then_some(true))?;
        object.put_some("error", self.error.as_ref())?;
        object.0.end()
    }
}

struct Object<M>(M);

impl<M: SerializeMap> Object<M> {
    fn put(&mut self, key: &str, value: impl Serialize) -> Result<(), M::Error> {
        self.0.serialize_entry(key, &value)
    }

    /// Writes nothing if there is no value.
    fn put_some(&mut self, key: &str, value: Option<impl Serialize>) -> Result<(), M::Error> {
        value.map_or(Ok(()), |value| self.put(key, value))
    }

    fn link(&mut self, record: &Record) -> Result<(), M::Error> {
        self.put_some("eth_source", record.ethernet.map(|(source, _)| source.to_string()))?;
        self.put_some("eth_destination", record.ethernet.map(|(_, destination)| destination.to_string()))?;
        let vlans: Vec<Vlan> = record.vlans.iter().map(Vlan::of).collect();
        self.put_some("vlans", (!vlans.is_empty()).then_some(vlans))?;
        self.put_some("tunnels", (!record.tunnels.is_empty()).then_some(&record.tunnels))
    }

    fn network(&mut self, record: &Record) -> Result<(), M::Error> {
        let network = &record.network;
        let is_ipv4 = network.header == NetworkHeader::Ipv4;
        self.put("network", protocol(network.header))?;
        self.put("source", network.source.to_ip())?;
        self.put("destination", network.destination.to_ip())?;
        self.put("dscp", network.traffic_class >> 2)?;
        self.put("ecn", network.traffic_class & 3)?;
        self.put("hop_limit", network.hop_limit)?;
        self.put_some("flow_label", (!is_ipv4).then_some(network.flow_label))?;
        self.put_some("identification", is_ipv4.then_some(network.identification))?;
        self.put_some("source_port", network.source_port)?;
        self.put_some("udp_checksum", record.udp_checksum)
    }

    fn bth(&mut self, bth: &Bth) -> Result<(), M::Error> {
        // The opcode may be unknown.
        self.put_some("opcode", Opcode::from_byte(bth.opcode_byte()).map(Opcode::name))?;
        self.put("opcode_byte", bth.opcode_byte())?;
        self.put("solicited", bth.solicited())?;
        self.put("mig_req", bth.mig_req())?;
        self.put("pad", bth.pad())?;
        self.put("transport_version", bth.transport_version())?;
        self.put("pkey", bth.pkey().0)?;
        self.put("fecn", bth.fecn())?;
        self.put("becn", bth.becn())?;
        self.put("dest_qp", bth.dest_qpn().value())?;
        self.put("ack_req", bth.ack_req())?;
        self.put("psn", bth.psn().value())
    }

    fn extensions(&mut self, extensions: &Extensions) -> Result<(), M::Error> {
        if let Some(deth) = &extensions.deth {
            self.put("qkey", deth.qkey())?;
            self.put("source_qp", deth.source_qpn().value())?;
        }
        if let Some(feth) = &extensions.feth {
            self.put("flush_selectivity", feth.selectivity().map(selectivity))?;
            self.put("flush_global_visibility", feth.flush_type().global_visibility)?;
            self.put("flush_persistence", feth.flush_type().persistence)?;
        }
        if let Some(reth) = &extensions.reth {
            self.put("va", reth.va())?;
            self.put("rkey", reth.rkey().value())?;
            self.put("dma_length", reth.length())?;
        }
        if let Some(atomic) = &extensions.atomic_eth {
            self.put("va", atomic.va())?;
            self.put("rkey", atomic.rkey().value())?;
            self.put("swap_or_add", atomic.swap_or_add())?;
            self.put("compare", atomic.compare())?;
        }
        if let Some(aeth) = &extensions.aeth {
            self.put("aeth", name(aeth))?;
            self.put("syndrome", aeth.syndrome_byte())?;
            self.put("msn", aeth.msn())?;
            self.put_some("credits", granted(aeth))?;
            self.put_some("rnr_timer_us", rnr_timer_us(aeth))?;
        }
        self.put_some("atomic_original", extensions.atomic_ack_eth.map(|ack| ack.original()))?;
        self.put_some("immediate", extensions.immdt.map(|immdt| immdt.value()))?;
        self.put_some("invalidate_rkey", extensions.ieth.map(|ieth| ieth.rkey().value()))
    }
}

#[derive(Serialize)]
struct Vlan {
    id: u16,
    priority: u8,
}

impl Vlan {
    fn of(tag: &VlanTag) -> Vlan {
        Vlan { id: tag.id, priority: tag.priority }
    }
}
