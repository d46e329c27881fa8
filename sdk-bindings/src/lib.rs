//! Safe owners over C libraries, one object a file. It does not know what they are used for.
