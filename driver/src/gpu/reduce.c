/* Reductions, one element a work item: target[i] = source0[i] OP source1[i] OP ..., from left to right. For OpenCL and for CUDA, which
 * define before it:
 *   KERNEL, GLOBAL          what a kernel and a pointer to the device's memory are declared with
 *   INDEX                   this work item's number
 *   FUNCTION                what other functions are declared with
 *   U8, U16, U32, U64       integers of so many bits; S8, S16, S32, S64 such with a sign
 *   FLOAT_OF, BITS_OF       a float of a U32 and back, bit by bit; DOUBLE_OF, LONG_BITS_OF of a U64 if there are doubles
 *   HALF_TO_FLOAT, FLOAT_TO_HALF   of a U16 and back, rounded to the nearest, ties to even
 * Elements are loaded and stored as unsigned integers, so that what is only chosen keeps its bits. A target may be one of the sources.
 *
 * Of each reduction there are two kernels: of two sources, which is what is computed most, and of as many as there are, whose result is
 * divided unless `by` is 0. */

/* Whether b takes the place of a. Of what is no number, b != b is true. */
#define IS_LESS(a, b) ((b) < (a) || (b) != (b))
#define IS_GREATER(a, b) ((b) > (a) || (b) != (b))

#define TARGET(STORED) GLOBAL STORED *target, U64 target_at
#define SOURCE(STORED, N) GLOBAL const STORED *source##N, U64 at##N
#define SOURCES(STORED)                                                                                               \
    SOURCE(STORED, 0), SOURCE(STORED, 1), SOURCE(STORED, 2), SOURCE(STORED, 3), SOURCE(STORED, 4), SOURCE(STORED, 5), \
        SOURCE(STORED, 6), SOURCE(STORED, 7)
#define ELEMENT(N) source##N[at##N + i]
/* JOIN takes what has been made of the sources before, `a`, and the element of the next. */
#define NEXT(N, JOIN)                                                                                                 \
    if (sources > N)                                                                                                  \
        a = JOIN(a, ELEMENT(N));

/* NUMBER is the type of what JOIN makes, FIRST makes it of the first element, and WHOLE makes of it what is stored. */
#define REDUCTION(NAME, STORED, NUMBER, FIRST, JOIN, WHOLE)                                                           \
    KERNEL void NAME(TARGET(STORED), SOURCE(STORED, 0), SOURCE(STORED, 1), U64 count) {                               \
        U64 i = INDEX;                                                                                                \
        if (i < count) {                                                                                              \
            NUMBER a = FIRST(ELEMENT(0));                                                                             \
            target[target_at + i] = WHOLE(JOIN(a, ELEMENT(1)), 0);                                                    \
        }                                                                                                             \
    }                                                                                                                 \
    KERNEL void NAME##_of_many(TARGET(STORED), SOURCES(STORED), U64 count, U64 sources, U64 by) {                     \
        U64 i = INDEX;                                                                                                \
        if (i < count) {                                                                                              \
            NUMBER a = FIRST(ELEMENT(0));                                                                             \
            NEXT(1, JOIN)                                                                                             \
            NEXT(2, JOIN)                                                                                             \
            NEXT(3, JOIN)                                                                                             \
            NEXT(4, JOIN)                                                                                             \
            NEXT(5, JOIN)                                                                                             \
            NEXT(6, JOIN)                                                                                             \
            NEXT(7, JOIN)                                                                                             \
            target[target_at + i] = WHOLE(a, by);                                                                     \
        }                                                                                                             \
    }

/* NUMBER is computed with: LOAD makes it of an element, STORE an element of it, DIVIDED its quotient. ORDERED is compared. Integers are
 * compared and divided with their sign, and wrap without. FACTOR is made of 64 bits. */
#define REDUCTIONS(TYPE, STORED, NUMBER, LOAD, STORE, ORDERED, DIVIDED, FACTOR)                                       \
    FUNCTION STORED whole_##TYPE(NUMBER a, U64 by) { return (STORED)STORE(by ? (NUMBER)DIVIDED(a, by) : a); }         \
    FUNCTION STORED chosen_##TYPE(STORED a, U64 by) { return by ? whole_##TYPE(LOAD(a), by) : a; }                    \
    FUNCTION NUMBER load_##TYPE(STORED a) { return LOAD(a); }                                                         \
    FUNCTION STORED as_it_is_##TYPE(STORED a) { return a; }                                                           \
    FUNCTION NUMBER plus_##TYPE(NUMBER a, STORED b) { return a + LOAD(b); }                                           \
    FUNCTION NUMBER times_##TYPE(NUMBER a, STORED b) { return a * LOAD(b); }                                          \
    FUNCTION STORED less_##TYPE(STORED a, STORED b) { return IS_LESS(ORDERED(a), ORDERED(b)) ? b : a; }               \
    FUNCTION STORED greater_##TYPE(STORED a, STORED b) { return IS_GREATER(ORDERED(a), ORDERED(b)) ? b : a; }         \
    REDUCTION(sum_##TYPE, STORED, NUMBER, load_##TYPE, plus_##TYPE, whole_##TYPE)                                     \
    REDUCTION(product_##TYPE, STORED, NUMBER, load_##TYPE, times_##TYPE, whole_##TYPE)                                \
    REDUCTION(min_##TYPE, STORED, STORED, as_it_is_##TYPE, less_##TYPE, chosen_##TYPE)                                \
    REDUCTION(max_##TYPE, STORED, STORED, as_it_is_##TYPE, greater_##TYPE, chosen_##TYPE)                             \
    KERNEL void scaled_##TYPE(TARGET(STORED), SOURCE(STORED, 0), U64 count, U64 factor) {                             \
        U64 i = INDEX;                                                                                                \
        if (i < count)                                                                                                \
            target[target_at + i] = (STORED)STORE(LOAD(ELEMENT(0)) * FACTOR(factor));                                 \
    }

#define AS_IT_IS(x) (x)
#define AS_U32(x) ((U32)(x))
#define AS_S8(x) ((S8)(x))
#define AS_S16(x) ((S16)(x))
#define AS_S32(x) ((S32)(x))
#define AS_S64(x) ((S64)(x))
#define AS_U8(x) ((U8)(x))
#define AS_U16(x) ((U16)(x))
#define FLOAT_FACTOR(bits) FLOAT_OF((U32)(bits))
#define QUOTIENT(x, by) ((x) / (by))
#define FLOAT_QUOTIENT(x, by) ((x) / (float)(by))
#define DOUBLE_QUOTIENT(x, by) ((x) / (double)(by))
/* Of what has as many bits as the type, and its sign. */
#define U8_QUOTIENT(x, by) (AS_U8(x) / (by))
#define U16_QUOTIENT(x, by) (AS_U16(x) / (by))
#define S8_QUOTIENT(x, by) ((S64)AS_S8(x) / AS_S64(by))
#define S16_QUOTIENT(x, by) ((S64)AS_S16(x) / AS_S64(by))
#define S32_QUOTIENT(x, by) ((S64)AS_S32(x) / AS_S64(by))
#define S64_QUOTIENT(x, by) (AS_S64(x) / AS_S64(by))

#define BF16_TO_FLOAT(x) FLOAT_OF((U32)(x) << 16)

FUNCTION U16 float_to_bf16(float value) {
    U32 bits = BITS_OF(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (U16)(bits >> 16 | 0x40); /* no number, and not infinity by being cut off */
    return (U16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Floats of 8 bits, as reduction/small_float.rs has them and explains them. */
#define FLOAT_OF_8_BITS(TYPE, MANTISSA, BIAS, OVERFLOW, FIRST_NONE, IS_IEEE)                                          \
    FUNCTION float TYPE##_to_float(U8 code) {                                                                         \
        U32 magnitude = code & 0x7f, shifted = magnitude << (23 - MANTISSA);                                          \
        U32 normal = shifted + ((U32)(127 - BIAS) << 23);                                                             \
        U32 subnormal = BITS_OF((float)magnitude * FLOAT_OF((U32)(128 - BIAS - MANTISSA) << 23));                     \
        U32 none = 0x7f800000 | (IS_IEEE ? shifted : 0x400000);                                                       \
        U32 finite = magnitude < (1 << MANTISSA) ? subnormal : normal;                                                \
        return FLOAT_OF((U32)(code & 0x80) << 24 | (magnitude < FIRST_NONE ? finite : none));                         \
    }                                                                                                                 \
    FUNCTION U8 float_to_##TYPE(float value) {                                                                        \
        U32 bits = BITS_OF(value), magnitude = bits & 0x7fffffff;                                                     \
        U32 bounded = magnitude < OVERFLOW ? magnitude : OVERFLOW;                                                    \
        U32 least_normal = (U32)(128 - BIAS) << 23, own = bounded & 0x7f800000;                                       \
        U32 exponent = own < least_normal ? least_normal : own;                                                       \
        U32 large = exponent + ((U32)(23 - MANTISSA) << 23);                                                          \
        U32 sum = BITS_OF(FLOAT_OF(bounded) + FLOAT_OF(large));                                                       \
        U32 code = (sum - large) + ((exponent - least_normal) >> (23 - MANTISSA));                                    \
        U32 payload = (magnitude | 0x400000) >> (23 - MANTISSA) & ((1 << MANTISSA) - 1);                              \
        if (IS_IEEE && magnitude > 0x7f800000)                                                                        \
            code = payload | FIRST_NONE;                                                                              \
        return (U8)(code | (bits >> 24 & 0x80));                                                                      \
    }

/* The least that overflows: 480 and 65536, as the bits of a float. */
FLOAT_OF_8_BITS(f8e4m3, 3, 7, 0x43f00000, 0x7f, 0)
FLOAT_OF_8_BITS(f8e5m2, 2, 15, 0x47800000, 0x7c, 1)

REDUCTIONS(f32, U32, float, FLOAT_OF, BITS_OF, FLOAT_OF, FLOAT_QUOTIENT, FLOAT_FACTOR)
REDUCTIONS(f16, U16, float, HALF_TO_FLOAT, FLOAT_TO_HALF, HALF_TO_FLOAT, FLOAT_QUOTIENT, FLOAT_FACTOR)
REDUCTIONS(bf16, U16, float, BF16_TO_FLOAT, float_to_bf16, BF16_TO_FLOAT, FLOAT_QUOTIENT, FLOAT_FACTOR)
REDUCTIONS(f8e4m3, U8, float, f8e4m3_to_float, float_to_f8e4m3, f8e4m3_to_float, FLOAT_QUOTIENT, FLOAT_FACTOR)
REDUCTIONS(f8e5m2, U8, float, f8e5m2_to_float, float_to_f8e5m2, f8e5m2_to_float, FLOAT_QUOTIENT, FLOAT_FACTOR)
REDUCTIONS(i8, U8, U32, AS_U32, AS_IT_IS, AS_S8, S8_QUOTIENT, AS_U32)
REDUCTIONS(u8, U8, U32, AS_U32, AS_IT_IS, AS_IT_IS, U8_QUOTIENT, AS_U32)
REDUCTIONS(i16, U16, U32, AS_U32, AS_IT_IS, AS_S16, S16_QUOTIENT, AS_U32)
REDUCTIONS(u16, U16, U32, AS_U32, AS_IT_IS, AS_IT_IS, U16_QUOTIENT, AS_U32)
REDUCTIONS(i32, U32, U32, AS_IT_IS, AS_IT_IS, AS_S32, S32_QUOTIENT, AS_U32)
REDUCTIONS(u32, U32, U32, AS_IT_IS, AS_IT_IS, AS_IT_IS, QUOTIENT, AS_U32)
REDUCTIONS(i64, U64, U64, AS_IT_IS, AS_IT_IS, AS_S64, S64_QUOTIENT, AS_IT_IS)
REDUCTIONS(u64, U64, U64, AS_IT_IS, AS_IT_IS, AS_IT_IS, QUOTIENT, AS_IT_IS)
#ifdef DOUBLE_OF
REDUCTIONS(f64, U64, double, DOUBLE_OF, LONG_BITS_OF, DOUBLE_OF, DOUBLE_QUOTIENT, DOUBLE_OF)
#endif
