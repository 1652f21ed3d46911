//! Whether declarations by hand are those of a C header: a C compiler prints where each field is.

use std::path::Path;
use std::process::Command;
use std::{env, fs, process};

/// Each structure's size and fields, as C and as Rust has them: lines of a C program that print the one, and the other.
#[macro_export]
macro_rules! layouts {
    ($($rust:ident, $c:literal: $($field:ident),*;)*) => {{
        let (mut program, mut here) = (String::new(), String::new());
        $(
            let c = $c;
            program += &format!("printf(\"{c} %zu\\n\", sizeof(struct {c}));\n");
            here += &format!("{c} {}\n", size_of::<$rust>());
            $(
                let field = stringify!($field);
                program += &format!("printf(\"{c}.{field} %zu\\n\", offsetof(struct {c}, {field}));\n");
                here += &format!("{c}.{field} {}\n", std::mem::offset_of!($rust, $field));
            )*
        )*
        (program, here)
    }};
}

/// What a C program prints that has these headers and statements.
pub fn printed(folder: &Path, headers: &[&str], statements: &str) -> String {
    let scratch = env::temp_dir().join(format!("ferroce-abi-{}", process::id()));
    fs::create_dir(&scratch).unwrap();
    let (source, binary) = (scratch.join("abi.c"), scratch.join("abi"));
    let mut text = String::from("#include <stddef.h>\n#include <stdio.h>\n");
    for header in headers {
        text += &format!("#include \"{header}\"\n");
    }
    text += &format!("int main(void) {{\n{statements}return 0; }}\n");
    fs::write(&source, text).unwrap();
    // Whoever links Rust has a C compiler.
    let built = Command::new("cc").arg("-I").arg(folder).arg("-o").arg(&binary).arg(&source).status();
    let output = Command::new(&binary).output();
    fs::remove_dir_all(&scratch).unwrap();
    assert!(built.unwrap().success());
    String::from_utf8(output.unwrap().stdout).unwrap()
}
