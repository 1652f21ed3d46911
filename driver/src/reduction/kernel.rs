//! The loops, compiled once for each type, operation and processor level.

use std::mem::MaybeUninit;
use std::ptr;

use super::element::{Block, Element, LANES, Level, Number, Op, Raw, map};
use crate::memory::{Span, SpanMut};

/// Blocks per piece. A piece stays in the first-level cache until it is stored. 16 to 128 were measured to be equally good.
const PIECE: usize = 32;

/// The number of sources that a processor prefetches at once.
const FEW: usize = 8;

/// The operands of a reduction.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    targets: &'a [SpanMut<'a>],
    sources: &'a [Span<'a>],
    divide_by: Option<u32>,
}

impl<'a> Job<'a> {
    /// # Panics
    /// If there is no target or no source, or the lengths differ.
    pub(super) fn new(
        targets: &'a [SpanMut<'a>],
        sources: &'a [Span<'a>],
        divide_by: Option<u32>,
    ) -> Job<'a> {
        assert!(!targets.is_empty() && !sources.is_empty(), "a reduction of something to somewhere");
        let len = targets[0].len();
        let lens = targets.iter().map(|target| target.len()).chain(sources.iter().map(|source| source.len()));
        lens.for_each(|other| assert_eq!(other, len, "a reduction of spans that are not equally long"));
        Job { targets, sources, divide_by }
    }
}

/// All loads and stores use pointers, not references: others may write the memory meanwhile, and a target may be a source.
/// Every block, or piece, of the sources is loaded before that of the target is stored.
#[inline(always)]
pub(super) fn reduce<E: Element, O: Op, L: Level>(job: Job<'_>) {
    match job {
        Job { targets: [target], sources: [first, second], divide_by: None } => {
            two::<E, O, L>(*target, *first, *second);
        }
        Job { targets: [target], .. } if job.sources.len() <= FEW && size_of::<E::Raw>() >= 4 => {
            few::<E, O, L>(*target, job);
        }
        _ => many::<E, O, L>(job),
    }
}

/// Two sources, in registers.
#[inline(always)]
fn two<E: Element, O: Op, L: Level>(target: SpanMut<'_>, first: Span<'_>, second: Span<'_>) {
    let mut at = 0;
    while target.len() - at >= block_len::<E>() {
        let joined = join::<E, O>(&load::<E, L>(first, at), &load::<E, L>(second, at));
        store::<E>(target, at, &E::narrow::<L>(&joined));
        at += block_len::<E>();
    }
    if at < target.len() {
        let joined = join::<E, O>(&load_rest::<E, L>(first, at), &load_rest::<E, L>(second, at));
        store_rest::<E>(target, at, &E::narrow::<L>(&joined));
    }
}

/// A few sources, in registers: 1.5 times as fast as [`many`]. For smaller elements, which need more registers, it is
/// slower.
#[inline(always)]
fn few<E: Element, O: Op, L: Level>(target: SpanMut<'_>, job: Job<'_>) {
    let (first, others) = (job.sources[0], &job.sources[1..]);
    let mut at = 0;
    while target.len() - at >= block_len::<E>() {
        let mut joined = load::<E, L>(first, at);
        for other in others {
            joined = join::<E, O>(&joined, &load::<E, L>(*other, at));
        }
        store::<E>(target, at, &finish::<E, L>(&joined, job.divide_by));
        at += block_len::<E>();
    }
    if at < target.len() {
        rest::<E, O, L>(job, at);
    }
}

/// Any number of sources and targets, piece by piece. Each piece is processed source by source, which suits the processor's
/// prefetching.
#[inline(always)]
fn many<E: Element, O: Op, L: Level>(job: Job<'_>) {
    let len = job.targets[0].len();
    let mut at = 0;
    while len - at >= block_len::<E>() {
        let blocks = ((len - at) / block_len::<E>()).min(PIECE);
        piece::<E, O, L>(job, at, blocks);
        at += blocks * block_len::<E>();
    }
    if at < len {
        rest::<E, O, L>(job, at);
    }
}

/// `blocks` blocks, at most [`PIECE`], from byte `at` on.
#[inline(always)]
fn piece<E: Element, O: Op, L: Level>(job: Job<'_>, at: usize, blocks: usize) {
    let at_block = |n: usize| at + n * block_len::<E>();
    let mut joined = [const { MaybeUninit::<Block<E::Number>>::uninit() }; PIECE];
    let joined = &mut joined[..blocks];
    let others = match job.sources {
        [first, second, others @ ..] => {
            for (n, joined) in joined.iter_mut().enumerate() {
                let (first, second) = (load::<E, L>(*first, at_block(n)), load::<E, L>(*second, at_block(n)));
                joined.write(join::<E, O>(&first, &second));
            }
            others
        }
        sources => {
            for (n, joined) in joined.iter_mut().enumerate() {
                joined.write(load::<E, L>(sources[0], at_block(n)));
            }
            &[]
        }
    };
    // SAFETY: all of them were initialised above.
    let joined = unsafe { &mut *(ptr::from_mut(joined) as *mut [Block<E::Number>]) };
    for source in others {
        for (n, joined) in joined.iter_mut().enumerate() {
            *joined = join::<E, O>(joined, &load::<E, L>(*source, at_block(n)));
        }
    }
    if let [target] = job.targets {
        for (n, joined) in joined.iter().enumerate() {
            store::<E>(*target, at_block(n), &finish::<E, L>(joined, job.divide_by));
        }
        return;
    }
    let mut narrow = [[E::Raw::default(); LANES]; PIECE];
    for (narrow, joined) in narrow.iter_mut().zip(joined) {
        *narrow = finish::<E, L>(joined, job.divide_by);
    }
    let narrow = &bytes_of(narrow.as_flattened_mut())[..blocks * block_len::<E>()];
    for target in job.targets {
        target.part(at, narrow.len()).copy_from(narrow.into());
    }
}

/// The last elements, from byte `at` on, fewer than a block.
#[inline(always)]
fn rest<E: Element, O: Op, L: Level>(job: Job<'_>, at: usize) {
    let mut joined = load_rest::<E, L>(job.sources[0], at);
    for source in &job.sources[1..] {
        joined = join::<E, O>(&joined, &load_rest::<E, L>(*source, at));
    }
    let narrow = finish::<E, L>(&joined, job.divide_by);
    for target in job.targets {
        store_rest::<E>(*target, at, &narrow);
    }
}

/// `target[i] = source[i] * factor`.
#[inline(always)]
pub(super) fn scale<E: Element, L: Level>(target: SpanMut<'_>, source: Span<'_>, factor: f64) {
    let factor = E::Number::factor(factor);
    let times = |block: &Block<E::Number>| E::narrow::<L>(&map(block, |number| number.times(factor)));
    let mut at = 0;
    while target.len() - at >= block_len::<E>() {
        store::<E>(target, at, &times(&load::<E, L>(source, at)));
        at += block_len::<E>();
    }
    if at < target.len() {
        store_rest::<E>(target, at, &times(&load_rest::<E, L>(source, at)));
    }
}

#[inline(always)]
fn join<E: Element, O: Op>(earlier: &Block<E::Number>, later: &Block<E::Number>) -> Block<E::Number> {
    let mut joined = *earlier;
    for (joined, &later) in joined.iter_mut().zip(later) {
        *joined = O::join(*joined, later);
    }
    joined
}

/// The block to store.
#[inline(always)]
fn finish<E: Element, L: Level>(joined: &Block<E::Number>, divide_by: Option<u32>) -> Block<E::Raw> {
    match divide_by.map(E::Number::divisor) {
        Some(by) => E::narrow::<L>(&map(joined, |number| number.divided(by))),
        None => E::narrow::<L>(joined),
    }
}

const fn block_len<E: Element>() -> usize {
    size_of::<Block<E::Raw>>()
}

/// The block of `from` at byte `at`.
#[inline(always)]
fn load<E: Element, L: Level>(from: Span<'_>, at: usize) -> Block<E::Number> {
    debug_assert!(at + block_len::<E>() <= from.len());
    // SAFETY: the loops stay inside the target, and all spans have its length ([`Job::new`]). Any bits are valid elements.
    let raw: Block<E::Raw> = unsafe { from.address().add(at).cast::<Block<E::Raw>>().read_unaligned() };
    E::widen::<L>(&raw)
}

/// Stores a block at byte `at` of `to`.
#[inline(always)]
fn store<E: Element>(to: SpanMut<'_>, at: usize, block: &Block<E::Raw>) {
    debug_assert!(at + block_len::<E>() <= to.len());
    // SAFETY: as in `load`.
    unsafe { to.address().add(at).cast::<Block<E::Raw>>().write_unaligned(*block) };
}

/// As [`load`], for less than a block, followed by zeros. So the same code computes the last elements.
#[inline(always)]
fn load_rest<E: Element, L: Level>(from: Span<'_>, at: usize) -> Block<E::Number> {
    let mut raw = [E::Raw::default(); LANES];
    from.split_at(at).1.copy_to(&mut bytes_of(&mut raw)[..from.len() - at]);
    E::widen::<L>(&raw)
}

/// As [`store`], for less than a block.
#[inline(always)]
fn store_rest<E: Element>(to: SpanMut<'_>, at: usize, block: &Block<E::Raw>) {
    let mut raw = *block;
    to.split_at(at).1.copy_from(Span::from(&bytes_of(&mut raw)[..to.len() - at]));
}

#[inline(always)]
fn bytes_of<R: Raw>(values: &mut [R]) -> &mut [u8] {
    let len = size_of_val(values);
    // SAFETY: elements have no padding, and any bits are valid ([`Raw`]); the result continues the unique borrow.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), len) }
}
