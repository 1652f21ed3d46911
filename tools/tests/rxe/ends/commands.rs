//! The commands to the peer.

use serde_json::{Value, json};

use super::{Ends, turn};

impl Ends {
    /// Sends a command to the peer, which must succeed; the engine is polled meanwhile.
    pub(super) fn ask(&mut self, command: &Value) -> Value {
        self.try_to_ask(command).unwrap_or_else(|error| panic!("the peer: {error}"))
    }

    /// As [`ask`](Ends::ask), for commands without a result; or queues the command.
    pub(super) fn tell(&mut self, command: Value) {
        match &mut self.kept {
            Some(kept) => kept.push(command),
            None => drop(self.ask(&command)),
        }
    }

    /// Whether commands are queued.
    pub(super) fn keeps(&self) -> bool {
        self.kept.is_some()
    }

    /// From now on commands without a result are queued until [`tell_all`](Ends::tell_all): with loss or delay, each
    /// command takes time.
    pub(crate) fn keep(&mut self) {
        self.kept = Some(Vec::new());
    }

    /// Ends the queueing: the peer executes all commands in order.
    pub(crate) fn tell_all(&mut self) {
        let commands = self.kept.take().unwrap_or_default();
        self.ask(&json!({"do": "all", "commands": commands}));
    }

    pub(super) fn try_to_ask(&mut self, command: &Value) -> Result<Value, String> {
        let Ends { context, poller, peer, .. } = self;
        peer.ask(command, || turn(context, poller))
    }
}
