//! Failure and recovery of rails.

use super::*;
use crate::channel::Path;
use crate::fallback;

impl Group {
    /// Leaves a rail to a peer: its outstanding messages are sent on the others.
    pub(super) fn leave_rail(
        &mut self,
        process: &mut Process<'_>,
        (peer, rail): (u32, usize),
        why: &str,
    ) -> Result<(), Error> {
        let Some(channel) = &mut self.peers[peer as usize].channel else { return Ok(()) };
        let was_left = channel.paths()[rail].is_left();
        channel.leave((process.ports, process.now), rail, self.options.retry_budget())?;
        if !was_left {
            self.report_left(process, (peer, rail), why);
        }
        self.next_look = Nanos::ZERO;
        Ok(())
    }

    /// Reports that a rail to a peer is not in use: in the log, the metrics and the flight recorder.
    fn report_left(&self, process: &mut Process<'_>, (peer, rail): (u32, usize), why: &str) {
        fallback::without_rail(process.ports, (self.rank, peer, rail), why);
        self.log.rail_is_left(peer, rail);
    }

    /// A peer has left a rail.
    pub(super) fn hear_left(
        &mut self,
        process: &mut Process<'_>,
        from: u32,
        left: &Left,
    ) -> Result<(), Error> {
        let Some(channel) = &mut self.peers[from as usize].channel else { return Ok(()) };
        if channel.paths().len() == 1 {
            // The only rail can't be left.
            return Ok(());
        }
        let rail = left.rail as usize;
        let was_left = channel.paths().get(rail).is_none_or(Path::is_left);
        let patience = self.options.retry_budget();
        let answer = channel.hear_left((process.ports, process.now), left, patience)?;
        if !was_left && channel.paths()[rail].is_left() {
            self.report_left(process, (from, rail), "the peer no longer uses it");
        }
        self.next_look = Nanos::ZERO;
        answer.map_or(Ok(()), |answer| self.tell(process, from, Message::Left(answer)))
    }

    /// Continues the recovery of rails that were left, and leaves failed ones.
    pub(super) fn mend_rails(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        if self.cqs.len() == 1 {
            return Ok(());
        }
        for index in 0..self.linked.len() {
            self.mend_rails_to(process, self.linked[index])?;
        }
        Ok(())
    }

    fn mend_rails_to(&mut self, process: &mut Process<'_>, peer: u32) -> Result<(), Error> {
        let (patience, again) = (self.options.retry_budget(), self.again());
        let Some(channel) = &mut self.peers[peer as usize].channel else { return Ok(()) };
        let timeout = self.options.timeout();
        if let Some(rail) = channel.suspects((process.ports, process.now), timeout)? {
            let why = "no message passes in several attempts, although the peer answers";
            return self.leave_rail(process, (peer, rail), why);
        }
        if let Some(rail) = channel.missed(patience / 4) {
            self.report_left(process, (peer, rail), "no message has arrived on it so far");
        }
        let Some(channel) = &mut self.peers[peer as usize].channel else { return Ok(()) };
        let (doubts, is_to_be_mended) = (channel.doubts(process.now, timeout), channel.is_to_be_mended());
        if doubts {
            // The peer must be heard again, on another rail.
            self.next_look = self.next_look.min(process.now + timeout / 8);
            let link = &mut self.peers[peer as usize];
            if process.now.since(link.pinged) >= timeout / 8 {
                link.pinged = process.now;
                self.tell(process, peer, Message::Ping { call: self.calls })?;
            }
        }
        if !is_to_be_mended {
            return Ok(());
        }
        let Some(channel) = &mut self.peers[peer as usize].channel else { return Ok(()) };
        let (executions, first) = (&mut self.executions, self.first);
        let (mut to_tell, mut chunks) = (Vec::new(), 0);
        let renewed = channel.mend(
            (process.ports, process.now),
            again,
            |rail| to_tell.push(rail),
            |waiting| {
                chunks += 1;
                sent(executions, first, waiting);
            },
        )?;
        self.is_dirty |= renewed || chunks > 0;
        if renewed {
            // The hello is sent immediately.
            self.next_look = Nanos::ZERO;
        }
        let peer_of_rail = &mut self.peers[peer as usize];
        if let Some((bytes, sending)) = peer_of_rail.chunks.end(chunks, process.now) {
            self.log.was_sending(peer, bytes, sending);
        }
        let Some(channel) = &mut peer_of_rail.channel else { return Ok(()) };
        let times = (patience.as_nanos() / again.as_nanos().max(1)) as u32;
        if let Some(rail) = channel.unanswered(process.now, times, patience) {
            if self.is_leaving && self.executions.is_empty() {
                // It has what it needed, and has left.
                channel.forget();
                return Ok(());
            }
            let how =
                format!("rail {rail} to it failed, and it has not answered on another one for {patience:?}");
            self.fail(Cause::Lost { peer, how });
            return Ok(());
        }
        if channel.is_to_be_mended() {
            self.next_look = self.next_look.min(process.now + again);
        }
        for rail in to_tell {
            let left =
                self.peers[peer as usize].channel.as_ref().and_then(|channel| channel.paths()[rail].left());
            left.map_or(Ok(()), |left| self.tell(process, peer, Message::Left(left)))?;
        }
        Ok(())
    }
}
