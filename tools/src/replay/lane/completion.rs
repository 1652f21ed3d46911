//! The completions of the engine and their data, compared with the recorded ones.

use ferroce::wire::{Operation, Service};
use ferroce::{Context, RKey, WcOpcode, WcStatus, WorkCompletion};

use super::{EMPTY, Lane, RECEIVE};
use crate::failure::Failure;
use crate::replay::conversation::Event;
use crate::replay::message::Message;
use crate::replay::packet::Seen;
use crate::replay::rule::{Finding, Rule, Weight};

impl Lane<'_> {
    /// Compares received data with sent data.
    pub(in crate::replay) fn completed(
        &mut self,
        context: &mut Context,
        wc: &WorkCompletion,
    ) -> Result<(), Failure> {
        let number = (wc.wr_id & !RECEIVE) as usize;
        let mtu = self.of.path_mtu.bytes() as usize;
        let received = wc.wr_id & RECEIVE != 0;
        let message = if received { self.received(number) } else { self.own.list.get(number).cloned() };
        let Some(message) = message else {
            return Ok(());
        };
        let frame = message.frame;
        let (offset, _) = self.sinks[if received { self.own.list.len() + number } else { number }];
        if received {
            if wc.status != WcStatus::Success {
                return Ok(());
            }
            let area = self.header_area();
            let (payload, whole) = message.payload(mtu);
            let immediate = message.tail().and_then(|packet| packet.immediate());
            if wc.opcode == WcOpcode::Recv && wc.byte_len as usize != payload.len() + area {
                let text = format!("{} bytes received of a SEND of {}", wc.byte_len, payload.len() + area);
                self.fault(Rule::Data, frame, text);
            } else if wc.immediate != immediate {
                let text = format!("immediate {:?} received, {immediate:?} was sent", wc.immediate);
                self.fault(Rule::Data, frame, text);
            } else if wc.opcode == WcOpcode::Recv && whole {
                self.compare(context, offset + area as u64, &payload, frame, "received")?;
            }
            // The next message may use the same place.
            let (memory, start) = (self.mr()?, offset as usize);
            if let Some(room) = context.bytes_mut(memory)?.get_mut(start..start + wc.byte_len as usize) {
                room.fill(EMPTY);
            }
            return Ok(());
        }
        if wc.status != WcStatus::Success {
            self.failed(wc.status, &message);
            return Ok(());
        }
        if wc.opcode == WcOpcode::RdmaRead {
            self.compare_read(context, offset, &message)?;
        }
        if matches!(wc.opcode, WcOpcode::CompSwap | WcOpcode::FetchAdd)
            && let Some(original) = self.of.answers[1 - self.end].original(message.first)
        {
            self.compare(context, offset, &original.to_ne_bytes(), frame, "returned by the atomic")?;
        }
        Ok(())
    }

    /// The message of a receive WR: that of the same number, or on an unreliable service that of the newest packet.
    fn received(&self, number: usize) -> Option<Message> {
        if self.of.service == Service::Rc {
            return self.theirs.list.get(number).cloned();
        }
        let is_theirs = |event: &&Event| event.from != self.end && event.packet.is_request();
        let newest = self.played.events.iter().rev().find(is_theirs)?;
        match self.of.service {
            Service::Ud => Some(Message::datagram(newest)),
            _ => self.theirs.at(newest.psn).cloned(),
        }
    }

    /// A work request has completed in error; later ones are not executed.
    fn failed(&mut self, status: WcStatus, message: &Message) {
        let first = self.played.given_up.map_or(message.first, |given_up| given_up.min(message.first));
        self.played.given_up = Some(first);
        self.played.dead_from.get_or_insert(self.played.events.len());
        let (weight, text) = match status {
            // The first error flushes the others.
            WcStatus::WrFlushErr => return,
            WcStatus::RetryExcErr | WcStatus::RnrRetryExcErr => (
                Weight::Lawful,
                format!("{status:?}: the recorded answers are to the recorded end's own repeats"),
            ),
            // The judge reports this about the other end.
            WcStatus::LocQpOpErr | WcStatus::BadRespErr | WcStatus::LocLenErr => {
                (Weight::Lawful, format!("the recorded answer is refused: {status:?}"))
            }
            _ if self.of.answers[1 - self.end].refused(i64::MIN, message.last).is_some() => return,
            _ => (Weight::Violation, format!("the work request ended with {status:?}")),
        };
        self.played.findings.push(Finding { rule: Rule::Completion, weight, frame: message.frame, text });
    }

    /// Compares the result of a READ with its responses, if all of them were recorded. A response that was repeated may
    /// differ, and both are correct.
    fn compare_read(&mut self, context: &Context, offset: u64, message: &Message) -> Result<(), Failure> {
        let (Some((_, _, len)), Some(memory)) = (message.remote(), self.memory) else { return Ok(()) };
        let answers = self.of.answers[1 - self.end].reads(message.first..message.last + 1);
        let arrived = |alike: &[(i64, usize)]| -> Vec<&Seen> {
            let events = alike.iter().map(|(_, index)| &self.of.events[*index]);
            events.filter(|event| !event.lost).map(|event| &*event.packet).collect()
        };
        let parts: Vec<Vec<&Seen>> = answers.map(|(_, alike)| arrived(alike)).collect();
        let lengths: Vec<usize> =
            parts.iter().flat_map(|part| part.first()).map(|p| p.payload_len()).collect();
        let is_whole = lengths.len() as i64 == message.last - message.first + 1;
        if !is_whole || lengths.iter().sum::<usize>() as u64 != len {
            return Ok(());
        }
        let bytes = context.bytes(memory)?.get(offset as usize..).unwrap_or_default();
        let mut at = 0;
        for (part, length) in parts.iter().zip(lengths) {
            let found = bytes.get(at..at + length).unwrap_or_default();
            if !part.iter().any(|packet| packet.payload == found) {
                let text = format!("bytes {at} to {} of {len} read are not what was recorded", at + length);
                self.fault(Rule::Data, message.frame, text);
                return Ok(());
            }
            at += length;
        }
        self.played.compared.0 += 1;
        self.played.compared.1 += len;
        Ok(())
    }

    fn compare(
        &mut self,
        context: &Context,
        offset: u64,
        expected: &[u8],
        frame: u64,
        what: &str,
    ) -> Result<(), Failure> {
        let bytes = context.bytes(self.mr()?)?;
        let found = bytes.get(offset as usize..).and_then(|rest| rest.get(..expected.len()));
        match found.and_then(|found| found.iter().zip(expected).position(|(a, b)| a != b)) {
            None => {
                self.played.compared.0 += 1;
                self.played.compared.1 += expected.len() as u64;
            }
            Some(at) => {
                let text = format!("byte {at} of {} {what} is not what was recorded", expected.len());
                self.fault(Rule::Data, frame, text);
            }
        }
        Ok(())
    }

    /// The other end's WRITEs that the engine has acknowledged since the last call.
    pub(in crate::replay) fn newly_answered(&mut self) -> Vec<(u64, RKey, u64, Vec<u8>)> {
        let theirs = &self.theirs;
        let mtu = self.of.path_mtu.bytes() as usize;
        let Some(newest) = self.newest_answer else { return Vec::new() };
        let until = theirs.list.partition_point(|message| message.last <= newest).max(self.answered);
        // Only those that ended in this turn: their memory can't have been overwritten since.
        let turn = self.turn;
        let ended = &self.ended;
        let fresh = theirs.list[self.answered..until].iter();
        let written = fresh.filter(|message| {
            let last =
                ended.iter().rev().take_while(|(_, at)| *at == turn).any(|(psn, _)| *psn == message.last);
            let is_kept = self.overwritten != Some(message.first);
            last && is_kept && message.operation() == Some(Operation::Write) && message.is_whole()
        });
        let answered = written.filter_map(|message| {
            let (addr, rkey, _) = message.remote()?;
            Some((message.frame, rkey, addr, message.payload(mtu).0))
        });
        let answered = answered.collect();
        self.answered = until;
        answered
    }
}
