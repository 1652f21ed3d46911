//! What the peer is told to do.

use serde_json::{Value, json};

use super::{Ends, turn};

impl Ends {
    /// Sends a command to the peer, which must do it; the engine goes on meanwhile.
    pub(super) fn ask(&mut self, command: &Value) -> Value {
        self.try_to_ask(command).unwrap_or_else(|error| panic!("the peer: {error}"))
    }

    /// As [`ask`](Ends::ask), where the answer says nothing more; or keeps the command.
    pub(super) fn tell(&mut self, command: Value) {
        match &mut self.kept {
            Some(kept) => kept.push(command),
            None => drop(self.ask(&command)),
        }
    }

    /// Whether commands are kept.
    pub(super) fn keeps(&self) -> bool {
        self.kept.is_some()
    }

    /// From now on what the peer is to do in answer to nothing is kept until [`tell_all`](Ends::tell_all): where packets are
    /// lost or late, each command takes its time.
    pub(crate) fn keep(&mut self) {
        self.kept = Some(Vec::new());
    }

    /// Ends that: the peer does it all, one after the other.
    pub(crate) fn tell_all(&mut self) {
        let commands = self.kept.take().unwrap_or_default();
        self.ask(&json!({"do": "all", "commands": commands}));
    }

    pub(super) fn try_to_ask(&mut self, command: &Value) -> Result<Value, String> {
        let Ends { context, poller, peer, .. } = self;
        peer.ask(command, || turn(context, poller))
    }
}
