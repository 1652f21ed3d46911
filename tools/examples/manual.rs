//! Writes the man pages of the command and its shell completions into two folders: `./do man`.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use clap::{CommandFactory, ValueEnum};
use clap_complete::Shell;
use ferroce_tools::Cli;

fn main() -> Result<(), Box<dyn Error>> {
    let folders: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    let [pages, completions] = &folders[..] else {
        return Err("usage: manual FOLDER-OF-MAN-PAGES FOLDER-OF-COMPLETIONS".into());
    };
    folders.iter().try_for_each(fs::create_dir_all)?;
    // Which drivers there are depends on the build.
    clap_mangen::generate_to(Cli::command().long_version(None::<&'static str>), pages)?;
    for shell in Shell::value_variants() {
        clap_complete::generate_to(*shell, &mut Cli::command(), "ferroce", completions)?;
    }
    Ok(())
}
