//! The descriptors of one kind of product, each with the addresses of some of its calls.
//!
//! A descriptor contains the addresses of factors, amax and bias. Setting one is a call of the library, so a call whose
//! addresses have been seen before uses the descriptor that contains them. A training loop in its steady state uses the same
//! addresses in every step: its weights stay where they are, and its memory is reused in the same order.
//!
//! A descriptor's addresses are numbers that the library reads when a product is enqueued or recorded. They may name freed
//! memory meanwhile; only a call that has the same addresses again uses that descriptor.

use super::cublaslt::{Attribute, CublasLt, Failure, Handle};
use super::product::{Places, Product};
use std::collections::HashMap;

/// The number of descriptors that one kind of product has at most: the layers of a model that share its shape. Beyond, the
/// oldest one gets the addresses of the new call.
const MOST: usize = 128;

/// The addresses in a descriptor; 0 for what the product does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Addresses {
    scale_a: u64,
    scale_b: u64,
    scale_d: u64,
    amax_d: u64,
    bias: u64,
}

impl Addresses {
    fn new(product: &Product, places: &Places) -> Self {
        let only = |is_used: bool, address: u64| if is_used { address } else { 0 };
        let (has_factors, writes_fp8) = (product.has_factors(), product.out.is_fp8());
        Self {
            scale_a: only(has_factors, places.right_scale),
            scale_b: only(has_factors, places.left_scale),
            scale_d: only(writes_fp8, places.out_scale),
            amax_d: only(writes_fp8, places.out_amax),
            bias: only(product.bias.is_some(), places.bias),
        }
    }

    /// Sets the addresses that the product has.
    fn set(&self, library: &CublasLt, operation: Handle, product: &Product) -> Result<(), Failure> {
        let set = |attribute, address: u64| library.set(operation, attribute, address);
        if product.has_factors() {
            set(Attribute::ScaleA, self.scale_a)?;
            set(Attribute::ScaleB, self.scale_b)?;
        }
        if product.out.is_fp8() {
            set(Attribute::ScaleD, self.scale_d)?;
            set(Attribute::AmaxD, self.amax_d)?;
        }
        if product.bias.is_some() {
            set(Attribute::Bias, self.bias)?;
        }
        Ok(())
    }
}

/// The descriptors made so far for one kind of product. Whoever has them destroys them with [`destroy`](Self::destroy).
#[derive(Debug, Default)]
pub(super) struct Descriptors {
    /// Handles with their addresses, `None` if setting them failed.
    all: Vec<(Handle, Option<Addresses>)>,
    by_addresses: HashMap<Addresses, usize>,
    /// The one that the previous call used.
    last: usize,
    /// The oldest one, once there are [`MOST`].
    oldest: usize,
    /// One that contains no addresses, because setting them failed.
    spare: Option<usize>,
}

impl Descriptors {
    /// Returns a descriptor of `product` with the addresses of a call. `create` makes one without addresses.
    pub(super) fn with_addresses(
        &mut self,
        library: &CublasLt,
        product: &Product,
        places: &Places,
        create: impl FnOnce() -> Result<Handle, Failure>,
    ) -> Result<Handle, Failure> {
        let addresses = Addresses::new(product, places);
        if let Some((handle, Some(contained))) = self.all.get(self.last)
            && *contained == addresses
        {
            return Ok(*handle);
        }
        let index = match self.by_addresses.get(&addresses) {
            Some(&index) => index,
            None => {
                let index = self.next(create)?;
                self.set(index, addresses, library, product)?;
                index
            }
        };
        self.last = index;
        Ok(self.all.get(index).map_or(std::ptr::null_mut(), |(handle, _)| *handle))
    }

    /// Returns a descriptor whose addresses can be set: a new one, or the oldest.
    fn next(&mut self, create: impl FnOnce() -> Result<Handle, Failure>) -> Result<usize, Failure> {
        if let Some(index) = self.spare.take() {
            return Ok(index);
        }
        if self.all.len() < MOST {
            self.all.push((create()?, None));
            return Ok(self.all.len() - 1);
        }
        let index = self.oldest;
        self.oldest = (self.oldest + 1) % MOST;
        if let Some(old) = self.all.get_mut(index).and_then(|(_, contained)| contained.take()) {
            self.by_addresses.remove(&old);
        }
        Ok(index)
    }

    fn set(
        &mut self,
        index: usize,
        addresses: Addresses,
        library: &CublasLt,
        product: &Product,
    ) -> Result<(), Failure> {
        let Some((handle, contained)) = self.all.get_mut(index) else { return Ok(()) };
        if let Err(failure) = addresses.set(library, *handle, product) {
            self.spare = Some(index);
            return Err(failure);
        }
        *contained = Some(addresses);
        self.by_addresses.insert(addresses, index);
        Ok(())
    }

    /// Destroys all descriptors. Work that is queued or recorded has what it needs of them.
    pub(super) fn destroy(&mut self, library: &CublasLt) {
        let Self { all, .. } = std::mem::take(self);
        all.into_iter().for_each(|(handle, _)| library.destroy_operation(handle));
    }
}
