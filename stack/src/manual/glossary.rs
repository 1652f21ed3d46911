#![doc = include_str!("glossary.md")]
