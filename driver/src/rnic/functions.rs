//! Functions of a library that is loaded at run time.

/// A table of functions that are called by name, with the code that finds them. Those after a `?` are optional.
macro_rules! functions {
    ($(#[$meta:meta])* $since:literal; $($field:ident, $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*
     $(? $maybe:ident, $maybe_symbol:literal: fn($($maybe_argument:ty),*) -> $maybe_result:ty;)*) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            $(pub(super) $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) -> $maybe_result>,)*
        }

        impl Functions {
            /// Fails with the name of a missing function.
            fn find(library: &libloading::Library) -> Result<Functions, String> {
                Ok(Functions {
                    // SAFETY: the types are those of the functions in rdma-core's headers. The library's name
                    // guarantees this ABI.
                    $($field: match unsafe { library.get(concat!($symbol, "\0").as_bytes()) } {
                        Ok::<libloading::Symbol<'_, _>, _>(found) => *found,
                        Err(_) => return Err(format!("it has no function {}; {} or later has it", $symbol, $since)),
                    },)*
                    // SAFETY: as above.
                    $($maybe: unsafe { library.get(concat!($maybe_symbol, "\0").as_bytes()) }
                        .ok()
                        .map(|found: libloading::Symbol<'_, _>| *found),)*
                })
            }
        }
    };
}
pub(super) use functions;
