//! Comparison of settings: `--compare off,dcqcn --compare pfc=on,off`. The lists are read with the parser of the
//! options, so every option can be compared.

use clap::{CommandFactory, Parser};

use super::options::{self, Settings};
use crate::failure::{Failure, legible};

/// Settings with their label in the report.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Compared {
    /// One word of each list, separated by spaces.
    pub(crate) label: String,
    pub(crate) settings: Settings,
}

/// The product of all lists: each alternative of the first with each of the second, and so on. The last list changes
/// fastest.
pub(crate) fn compared(lists: &[String], base: &Settings) -> Result<Vec<Compared>, Failure> {
    const MOST: usize = 1024;
    let lengths = lists.iter().map(|list| alternatives(list).len());
    let count = lengths.fold(1_usize, usize::saturating_mul);
    if count > MOST {
        return Err(Failure::usage(format!("--compare: must be at most {MOST} settings; these are {count}")));
    }
    check_keys(lists, base)?;
    let mut all = vec![Compared { label: String::new(), settings: base.clone() }];
    for list in lists {
        let alternatives = alternatives(list);
        let mut crossed = Vec::new();
        for one in &all {
            for alternative in &alternatives {
                crossed.push(one.with(alternative, list)?);
            }
        }
        all = crossed;
    }
    for (at, one) in all.iter().enumerate() {
        if let Some(same) = all[..at].iter().find(|other| other.settings == one.settings) {
            let (label, same) = (legible(&one.label), legible(&same.label));
            return Err(Failure::usage(format!(
                "--compare: '{label}' is the same as '{same}'; give each setting once"
            )));
        }
    }
    Ok(all)
}

/// Checks that an option is in one list only, once in each alternative, and not given separately.
fn check_keys(lists: &[String], base: &Settings) -> Result<(), Failure> {
    let mut taken: Vec<String> = Vec::new();
    for list in lists {
        let mut of_list: Vec<String> = Vec::new();
        for alternative in alternatives(list) {
            for (at, (key, value)) in alternative.iter().enumerate() {
                let (shown, key_shown) = (legible(list), legible(key));
                if alternative[..at].iter().any(|(other, _)| other == key) {
                    return Err(Failure::usage(format!(
                        "--compare {shown}: {key_shown} is given twice in one setting, the second time as {}; a comma, not a plus, stands between two settings",
                        legible(value)
                    )));
                }
                if taken.contains(key) {
                    return Err(Failure::usage(format!(
                        "--compare {shown}: {key_shown} is in another --compare too; give all its values in one"
                    )));
                }
            }
            of_list.extend(alternative.into_iter().map(|(key, _)| key));
        }
        taken.extend(of_list);
    }
    match options::given(base).into_iter().find(|(name, _)| taken.contains(name)) {
        None => Ok(()),
        Some((name, value)) => {
            Err(Failure::usage(format!("--{name} {value}: must be left out: --compare has {name} too")))
        }
    }
}

/// Options with values that apply together.
type Alternative = Vec<(String, String)>;

/// Commas separate alternatives, a plus separates the options of one. A word without an option belongs to the previous
/// option, or to `congestion`; a parameter of a congestion control belongs to the previous control.
fn alternatives(list: &str) -> Vec<Alternative> {
    let command = Line::command();
    let is_option = |key: &str| command.get_arguments().any(|option| option.get_long() == Some(key));
    let mut alternatives: Vec<Alternative> = Vec::new();
    let mut last = "congestion".to_owned();
    for element in list.split(',') {
        let key = element.split_once('=').map(|(key, _)| key);
        let before = alternatives.last_mut().and_then(|alternative| alternative.last_mut());
        if let Some((option, value)) = before
            && option == "congestion"
            && key.is_some_and(|key| !is_option(key) && key.contains('_'))
        {
            *value += &format!(",{element}");
            continue;
        }
        let options = element.split('+').map(|part| {
            let (key, value) = part.split_once('=').unwrap_or((&last, part));
            let option = (key.to_owned(), value.to_owned());
            last = option.0.clone();
            option
        });
        alternatives.push(options.collect());
    }
    alternatives
}

/// Settings as a command line.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Line {
    #[command(flatten)]
    settings: Settings,
}

impl Compared {
    fn with(&self, alternative: &Alternative, list: &str) -> Result<Compared, Failure> {
        let mut line = Line { settings: self.settings.clone() };
        let mut words = Vec::new();
        for (key, value) in alternative {
            let command = Line::command();
            let names: Vec<&str> = command.get_arguments().filter_map(|option| option.get_long()).collect();
            if !names.contains(&key.as_str()) {
                let names = names.join(", ");
                let (list, key) = (legible(list), legible(key));
                return Err(Failure::usage(format!(
                    "--compare {list}: no option '{key}' to compare; a list such as off,dcqcn or kmin=50KB,100KB of one of: {names}"
                )));
            }
            line.try_update_from([format!("--{key}={value}")]).map_err(|error| {
                let text = error.to_string();
                let text = text.trim_start_matches("error: ").split("\n\n").next().unwrap_or_default();
                // A single word may be a misspelled option.
                let names = match list.contains('=') {
                    true => String::new(),
                    false => format!(
                        "; or values of an option, as kmin=50KB,100KB; options are {}",
                        names.join(", ")
                    ),
                };
                Failure::usage(format!("--compare {}: {}{names}", legible(list), legible(text.trim_end())))
            })?;
            let speaks_for_itself = ["congestion", "repeat"].contains(&key.as_str());
            words.push(if speaks_for_itself { value.clone() } else { format!("{key}={value}") });
        }
        let label = [self.label.as_str(), &words.join("+")].join(" ").trim().to_owned();
        Ok(Compared { label, settings: line.settings })
    }
}

#[cfg(test)]
mod tests {
    use super::super::description::Repeat;
    use super::*;
    use crate::quantity::Bytes;

    fn labels(lists: &[&str]) -> Vec<String> {
        let lists: Vec<String> = lists.iter().map(|list| (*list).to_owned()).collect();
        compared(&lists, &Settings::default()).unwrap().into_iter().map(|one| one.label).collect()
    }

    #[test]
    fn lists_are_crossed() {
        assert_eq!(labels(&[]), [""]);
        assert_eq!(labels(&["off,dcqcn"]), ["off", "dcqcn"]);
        assert_eq!(
            labels(&["off,dcqcn", "pfc=on,off"]),
            ["off pfc=on", "off pfc=off", "dcqcn pfc=on", "dcqcn pfc=off"]
        );
        assert_eq!(
            labels(&["mlx5,rpg_ai_rate=20,rpg_hai_rate=40,mlx5"]),
            ["mlx5,rpg_ai_rate=20,rpg_hai_rate=40", "mlx5"]
        );
        assert_eq!(labels(&["kmin=50KB+pfc=off,kmin=100KB"]), ["kmin=50KB+pfc=off", "kmin=100KB"]);
    }

    #[test]
    fn what_is_compared_is_changed_and_the_rest_stays() {
        let base = Settings { kmax: Some(Bytes(9)), ..Settings::default() };
        let all = compared(&["kmin=2,3KB".into(), "repeat=selective".into()], &base).unwrap();
        let changed =
            |kmin| Settings { kmin: Some(Bytes(kmin)), repeat: Some(Repeat::Selective), ..base.clone() };
        assert_eq!(
            all.iter().map(|one| one.settings.clone()).collect::<Vec<_>>(),
            [changed(2), changed(3000)]
        );
    }

    #[test]
    fn what_can_not_be_compared_is_named() {
        for (list, words) in [
            ("colour=red", "no option 'colour'"),
            ("kmin=big", "'big'"),
            ("fast", "fast"),
            ("pfc=maybe", "on or off"),
            ("", "congestion"),
        ] {
            let error = compared(&[list.to_owned()], &Settings::default()).unwrap_err().to_string();
            assert!(error.starts_with(&format!("--compare {list}: ")) && error.contains(words), "{error}");
        }
    }
}
